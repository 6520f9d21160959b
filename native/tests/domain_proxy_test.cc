#include "engine/domain_proxy.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <memory>

#include "tests/scheduler_test_support.h"

namespace kvc::test {
namespace {

// Both sides of a proxy, on one thread.
struct Ends {
  std::shared_ptr<Waker> waker = Waker::create().value();
  std::shared_ptr<DomainPassage> passage = std::make_shared<DomainPassage>(waker);
  FakeDomain* domain = new FakeDomain;
  DrivenDomain driven{std::unique_ptr<Domain>(domain), passage};
  DomainProxy proxy{passage, [] {}, [] {}};

  size_t heard() {
    proxy.poll();
    size_t count = 0;
    proxy.completions().drain([&](Completion&) { ++count; });
    return count;
  }
  bool woken() const {
    pollfd wait{waker->fd(), POLLIN, 0};
    return ::poll(&wait, 1, 0) == 1;
  }
};

TEST(DomainProxy, WhatTheRingHadNoRoomForWakesTheSchedulerAsWell) {
  Ends ends;
  for (WorkId work = 0; work < DomainPassage::kTold + 1; ++work) ends.domain->completions().done(work);
  EXPECT_TRUE(ends.driven.turn());
  EXPECT_EQ(ends.heard(), DomainPassage::kTold);
  ASSERT_TRUE(ends.proxy.prepare_sleep());
  EXPECT_TRUE(ends.driven.turn());
  EXPECT_TRUE(ends.woken());
  EXPECT_EQ(ends.heard(), 1U);
}

}  // namespace
}  // namespace kvc::test
