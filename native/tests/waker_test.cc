#include "base/waker.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/poll_loop.h"

namespace kvc {
namespace {

bool readable(const Waker& waker) {
  pollfd wait{waker.fd(), POLLIN, 0};
  return poll(&wait, 1, 0) == 1;
}

TEST(Waker, SignalsOnlySleepingThreads) {
  const auto waker = Waker::create().value();
  waker->wake();
  EXPECT_FALSE(readable(*waker));
  waker->announce_sleep();
  waker->wake();
  EXPECT_TRUE(readable(*waker));
  waker->awake();
  EXPECT_FALSE(readable(*waker));
}

// A thread takes the announcement back, is preempted, and signals only when the transfer thread sleeps again, after
// having been awake for another reason.
TEST(Waker, ALateSignalDoesNotOutliveTheNextSleep) {
  const auto waker = Waker::create().value();
  waker->announce_sleep();
  waker->wake();
  waker->announce_sleep();
  waker->awake();
  EXPECT_FALSE(readable(*waker));
}

// Another thread does its work, and reports it between the last look for work and the announcement of the sleep.
class LateNews : public PollLoop::Work {
 public:
  LateNews(PollLoop& loop, Waker& waker) : loop_(loop), waker_(waker) {}

  bool turn() override {
    if (!done_.exchange(true)) {
      waker_.nudge();
      return false;
    }
    loop_.stop();
    seen = true;
    return true;
  }
  bool prepare_sleep() override { return true; }
  std::optional<std::chrono::milliseconds> longest_sleep() const override { return std::chrono::seconds(5); }

  std::atomic<bool> seen = false;

 private:
  PollLoop& loop_;
  Waker& waker_;
  std::atomic<bool> done_ = false;
};

TEST(Waker, ANudgeJustBeforeTheSleepIsNotSleptThrough) {
  const auto waker = Waker::create().value();
  PollLoop loop(waker);
  ASSERT_TRUE(loop.open("test", -1));
  LateNews work(loop, *waker);
  const auto began = std::chrono::steady_clock::now();
  loop.run(work, std::chrono::microseconds(0));
  EXPECT_TRUE(work.seen);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(4)) << "it slept";
}

}  // namespace
}  // namespace kvc
