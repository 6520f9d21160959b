#include "engine/waker.h"

#include <gtest/gtest.h>
#include <poll.h>

namespace kvc {
namespace {

bool readable(const Waker& waker) {
  pollfd wait{waker.fd(), POLLIN, 0};
  return poll(&wait, 1, 0) == 1;
}

TEST(Waker, SignalsOnlyWhoSleeps) {
  const auto waker = Waker::create().value();
  waker->wake();
  EXPECT_FALSE(readable(*waker));
  waker->announce_sleep();
  waker->wake();
  EXPECT_TRUE(readable(*waker));
  waker->awake();
  EXPECT_FALSE(readable(*waker));
}

// A thread takes the announcement back, is preempted, and signals only when the worker, awake meanwhile for another
// reason, sleeps again.
TEST(Waker, ALateSignalDoesNotOutliveTheNextSleep) {
  const auto waker = Waker::create().value();
  waker->announce_sleep();
  waker->wake();
  waker->announce_sleep();
  waker->awake();
  EXPECT_FALSE(readable(*waker));
}

}  // namespace
}  // namespace kvc
