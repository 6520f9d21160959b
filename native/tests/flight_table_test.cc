// Work ids: work in flight is never mistaken for other work, however long a transfer engine runs.

#include "engine/flight_table.h"

#include <array>
#include <set>

#include "engine/message.h"
#include "tests/scheduler_test_support.h"

namespace kvc::test {
namespace {

// So that the generations wrap around after a few writes.
constexpr uint32_t kLateGeneration = 0xFFFFFFFD;

TEST(FlightTable, AnIdIsItsFlightsAloneWhereTheGenerationsBeginAnew) {
  FlightTable flights(kLateGeneration);
  Link link;
  const WorkId neighbour = flights.take({.message = true, .link = &link});
  std::set<WorkId> given{neighbour};
  for (uint64_t i = 0; i < 8; ++i) {
    // Alternates between a write and a goodbye, which names a peer.
    const auto peer = static_cast<uint32_t>(i % 2);
    const WorkId work = flights.take({.message = peer != 0, .goodbye_to = peer, .charge = 10 * i, .link = &link});
    EXPECT_TRUE(given.insert(work).second) << "the id of another one";
    for (const WorkId other : given) {
      const bool in_flight = other == work || other == neighbour;
      EXPECT_EQ(flights.find(other).has_value(), in_flight) << "id " << other << ", generation " << i;
    }
    const uint32_t place = flights.find(work).value();
    EXPECT_EQ(flights[place].charge, 10 * i);
    flights.leave_link(place);
    EXPECT_EQ(flights.end(place).goodbye_to, peer);
    EXPECT_EQ(link.bytes_in_flight, 0U);
    EXPECT_EQ(link.messages_in_flight, 1U);
  }
  EXPECT_EQ(flights.find(neighbour), std::optional<uint32_t>(0));
}

TEST(FlightTable, WhatWasNotPostedAfterAllUsesNoGenerationUp) {
  FlightTable flights(kLateGeneration);
  Link link;
  const WorkId first = flights.take({.charge = 1, .link = &link});
  flights.put_back(first);
  EXPECT_FALSE(flights.find(first).has_value());
  EXPECT_EQ(link.bytes_in_flight, 0U);
  EXPECT_EQ(flights.take({.charge = 2, .link = &link}), first);
  EXPECT_EQ(link.bytes_in_flight, 2U);
}

class AgedScheduler : public Scheduler {
 protected:
  AgedScheduler() : Scheduler(kLateGeneration) {}
};

// With one write in flight at a time, all writes use the first place, and its generation rises with each.
TEST_F(AgedScheduler, WritesGoOnWhereTheGenerationsBeginAnew) {
  connect(1);
  for (int i = 0; i < 8; ++i) {
    const auto transfer = open();
    write(*transfer, 100);
    scheduler.seal(*transfer);
    post_all();
    ASSERT_EQ(postings(0).size(), static_cast<size_t>(i) + 1);
    const TransferScheduler::Ended ended = scheduler.complete(postings(0).back().work, nullptr);
    EXPECT_EQ(ended.goodbye_to, 0U) << "a write was taken for a goodbye";
    scheduler.settle();
    expect_done(1);
    expect_clean();
  }
}

// A goodbye is a flight like any other. It is never mistaken for a write or for the goodbye of another peer, and no
// write is mistaken for it.
TEST_F(AgedScheduler, AGoodbyeAndAWriteAreDistinguishedInEveryGeneration) {
  connect(1);
  const std::array goodbye{static_cast<std::byte>(MessageTag::kGoodbye)};
  for (int i = 0; i < 8; ++i) {
    const auto transfer = open();
    write(*transfer, 100);
    scheduler.seal(*transfer);
    post_all();
    const WorkId written = postings(0).back().work;
    ASSERT_TRUE(scheduler.say_goodbye(*peer, goodbye));
    const WorkId said = postings(0).back().work;
    ASSERT_NE(said, written);
    EXPECT_EQ(scheduler.complete(said, nullptr).goodbye_to, peer->id);
    scheduler.settle();
    EXPECT_FALSE(ended().has_value()) << "the goodbye's end was taken for the write's";
    EXPECT_EQ(scheduler.complete(written, nullptr).goodbye_to, 0U);
    scheduler.settle();
    expect_done(1);
    expect_clean();
  }
}

}  // namespace
}  // namespace kvc::test
