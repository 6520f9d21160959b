#include "engine/event_queue.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <thread>

namespace kvc {
namespace {

using Subject = EventQueue::Subject;
constexpr Timeout kLong = std::chrono::seconds(30);
const auto kPending = [] { return true; };

Event done(uint64_t id) { return Event{.kind = EventKind::kTransferDone, .id = id}; }

bool readable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return poll(&entry, 1, 0) == 1;
}

struct Queue : EventQueue {
  Queue() { EXPECT_TRUE(open().ok()); }
};

TEST(EventQueue, PollTakesEventsInOrderAndOnce) {
  Queue queue;
  for (uint64_t id = 1; id <= 3; ++id) queue.push(done(id));
  const std::vector<Event> first = queue.poll(2);
  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(first[0].id, 1U);
  EXPECT_EQ(first[1].id, 2U);
  EXPECT_EQ(queue.poll(9).size(), 1U);
  EXPECT_TRUE(queue.poll(9).empty());
}

TEST(EventQueue, TheDescriptorIsReadableWhileSomethingIsThere) {
  Queue queue;
  queue.push(done(1));  // before the first call of fd()
  EXPECT_TRUE(readable(queue.fd()));
  queue.push(done(2));
  EXPECT_EQ(queue.poll(1).size(), 1U);
  EXPECT_TRUE(readable(queue.fd()));
  EXPECT_TRUE(queue.wait(Subject::kTransfer, 2, kLong, kPending).ok());
  EXPECT_FALSE(readable(queue.fd()));
  queue.push(done(3));
  EXPECT_TRUE(readable(queue.fd()));
}

TEST(EventQueue, AnEventThatIsWaitedForDoesNotShowUpInPoll) {
  Queue queue;
  std::atomic<bool> waiting{false};
  Result<Event> got = Error{};
  std::thread waiter([&] {
    got = queue.wait(Subject::kTransfer, 7, kLong, [&] {
      waiting = true;
      return true;
    });
  });
  while (!waiting) std::this_thread::yield();
  queue.push(done(7));
  EXPECT_TRUE(queue.poll(9).empty());
  waiter.join();
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got.value().id, 7U);
}

TEST(EventQueue, EventsOfAWaiterAreKeptWhileItsConditionIsEvaluated) {
  Queue queue;
  const Result<Event> got = queue.wait(Subject::kTransfer, 7, kLong, kPending, [&] {
    queue.push(done(7));
    EXPECT_TRUE(queue.poll(9).empty());
    return true;
  });
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got.value().id, 7U);
}

TEST(EventQueue, WhatWasToComeForOneThatLeavesIsPolled) {
  Queue queue;
  const Result<Event> got = queue.wait(Subject::kTransfer, 7, kLong, kPending, [&] {
    queue.push(done(7));
    return false;
  });
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.error().code, ErrorCode::kCancelled);
  EXPECT_EQ(queue.poll(9).size(), 1U);
}

TEST(EventQueue, WhatIsLeftByTheLastWaiterIsPolled) {
  Queue queue;
  std::atomic<bool> waiting{false};
  std::thread waiter([&] {
    EXPECT_TRUE(queue
                    .wait(Subject::kTransfer, 7, kLong,
                          [&] {
                            waiting = true;
                            return true;
                          })
                    .ok());
  });
  while (!waiting) std::this_thread::yield();
  // As for counters that reach two targets before the waiting thread is awake.
  queue.push(done(7));
  queue.push(done(7));
  waiter.join();
  EXPECT_EQ(queue.poll(9).size(), 1U);
}

TEST(EventQueue, TheSameNumberOfAnotherKindIsAnotherEvent) {
  Queue queue;
  queue.push(Event{.kind = EventKind::kCountersReached, .id = 5});
  EXPECT_EQ(queue.wait(Subject::kTransfer, 5, Timeout(1000), kPending).error().code, ErrorCode::kTimeout);
  EXPECT_TRUE(queue.wait(Subject::kCounters, 5, Timeout(0), kPending).ok());
}

TEST(EventQueue, WaitingForWhatCannotComeFailsAtOnce) {
  Queue queue;
  EXPECT_EQ(queue.wait(Subject::kTransfer, 1, kLong, [] { return false; }).error().code, ErrorCode::kInvalidArgument);
  queue.push(done(1));  // an event that has arrived already is taken
  EXPECT_TRUE(queue.wait(Subject::kTransfer, 1, kLong, [] { return false; }).ok());
}

TEST(EventQueue, DiscardDropsTheEventAndWakesWaiters) {
  Queue queue;
  queue.push(Event{.kind = EventKind::kCountersReached, .id = 5});
  queue.discard(Subject::kCounters, 5);
  EXPECT_TRUE(queue.poll(9).empty());
  std::atomic<bool> pending{true};
  std::atomic<bool> waiting{false};
  std::thread waiter([&] {
    const Result<Event> got = queue.wait(Subject::kCounters, 6, kLong, [&] {
      waiting = true;
      return pending.load();
    });
    EXPECT_EQ(got.error().code, ErrorCode::kInvalidArgument);
  });
  while (!waiting) std::this_thread::yield();
  pending = false;
  queue.discard(Subject::kCounters, 6);
  waiter.join();
}

TEST(EventQueue, AFinalEventOfAForgottenIdIsNone) {
  Queue queue;
  queue.push_if(done(1), [] { return false; });
  EXPECT_TRUE(queue.poll(9).empty());
  bool forgotten = false;
  queue.push_if(done(2), [&] { return forgotten = true; });
  EXPECT_TRUE(forgotten);
  EXPECT_EQ(queue.poll(9).size(), 1U);
}

}  // namespace
}  // namespace kvc
