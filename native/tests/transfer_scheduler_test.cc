// The scheduler alone: which link each batch takes, and that the counts stay exact however links break.

#include "engine/transfer_scheduler.h"

#include <map>
#include <set>

#include "engine/message.h"
#include "tests/scheduler_test_support.h"

namespace kvc::test {
namespace {

// --- Choice of the link

TEST_F(Scheduler, EqualLinksTakeTurns) {
  connect(3);
  const auto transfer = open();
  write_pages(*transfer, 6 * 64, 1024);
  post_all();
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(postings(i).size(), 2U) << i;
}

TEST_F(Scheduler, EachBatchGoesWithTheKeyOfItsLinksRemoteDomain) {
  connect(3);
  const auto transfer = open();
  for (int i = 0; i < 7; ++i) write(*transfer, 100);
  post_all();
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_FALSE(postings(i).empty());
    for (const auto& posting : postings(i)) {
      EXPECT_EQ(posting.rkey, 100 + i);
      EXPECT_EQ(posting.link, i + 1);
    }
  }
}

TEST_F(Scheduler, PagesAreSpreadByTheSpeedOfTheLinks) {
  connect(3);
  link(1).cost = 2;  // half as fast
  link(2).cost = 4;
  const auto transfer = open();
  write_pages(*transfer, 7 * 16, 65536);  // 7 batches of 1 MiB
  post_all();
  EXPECT_EQ(bytes_posted(), (std::vector<uint64_t>{4 * kMiB, 2 * kMiB, 1 * kMiB}));
}

TEST_F(Scheduler, ALinkThatLagsBehindGetsLess) {
  connect(2);
  const auto transfer = open();
  write_pages(*transfer, 4 * 16, 65536);
  post_all();
  complete(0);
  write_pages(*transfer, 4 * 16, 65536);
  post_all();
  EXPECT_EQ(bytes_posted(), (std::vector<uint64_t>{5 * kMiB, 3 * kMiB}));
}

TEST_F(Scheduler, ALinkHasNoMoreInFlightThanItsWindow) {
  connect(2);
  const auto transfer = open();
  write_pages(*transfer, 20 * 16, 65536);
  post_all();
  EXPECT_EQ(bytes_posted(), (std::vector<uint64_t>{8 * kMiB, 8 * kMiB}));
  complete(1);
  post_all();
  EXPECT_EQ(bytes_posted(), (std::vector<uint64_t>{8 * kMiB, 12 * kMiB}));
}

TEST_F(Scheduler, TinyPagesCannotFillALinkWithoutEnd) {
  connect(1);
  const auto transfer = open();
  write_pages(*transfer, 200000, 1);
  post_all();
  EXPECT_EQ(bytes_posted()[0], 8 * kMiB / 256);
}

TEST_F(Scheduler, WhatABusyLinkRefusesGoesOverAnother) {
  connect(2);
  domains[0]->busy = true;
  const auto transfer = open();
  write_pages(*transfer, 4 * 16, 65536);
  scheduler.seal(*transfer);
  post_all();
  EXPECT_EQ(bytes_posted(), (std::vector<uint64_t>{0, 4 * kMiB}));
  domains[1]->busy = true;
  const auto second = open();
  write(*second, 100);
  scheduler.seal(*second);
  post_all();
  EXPECT_EQ(link(0).bytes_in_flight, 0U);
  domains[0]->busy = false;
  post_all();
  EXPECT_EQ(postings(0).size(), 1U);
  run();
  expect_clean();
}

TEST_F(Scheduler, APinnedWriteTakesItsDomainAsLongAsThatWorks) {
  connect(3);
  const auto transfer = open();
  for (int i = 0; i < 4; ++i) write(*transfer, 5 * kMiB, kCounter, 1);
  post_all();
  EXPECT_EQ(bytes_posted(), (std::vector<uint64_t>{0, 8 * kMiB, 0}));  // a window of it, in parts
  complete(1);
  post_all();
  EXPECT_EQ(bytes_posted(), (std::vector<uint64_t>{0, 16 * kMiB, 0}));
  link(1).state = Link::State::kOut;
  post_all();
  const std::vector<uint64_t> bytes = bytes_posted();
  EXPECT_EQ(bytes[0] + bytes[2], 4 * kMiB);
}

// --- Split writes

TEST_F(Scheduler, ALargeWriteIsSplitAndCountsOnceAfterAllItsParts) {
  connect(2);
  const auto transfer = open();
  write(*transfer, 4 * kMiB + 10);
  scheduler.seal(*transfer);
  post_all();
  EXPECT_EQ(raised(0) + raised(1), 0U);
  const std::vector<uint64_t> bytes = bytes_posted();
  EXPECT_EQ(bytes[0] + bytes[1], 4 * kMiB + 10);
  EXPECT_GT(bytes[0], kMiB);
  EXPECT_GT(bytes[1], kMiB);
  // Every byte once, in parts of at least 512 KiB, except the last one.
  std::map<uint64_t, uint64_t> parts;
  for (size_t i = 0; i < 2; ++i) {
    for (const auto& posting : postings(i)) {
      ASSERT_EQ(posting.pages.size(), 1U);
      EXPECT_EQ(posting.pages[0].source, memory.data() + posting.pages[0].target_offset);
      parts[posting.pages[0].target_offset] = posting.page_bytes;
    }
  }
  uint64_t next = 0;
  for (const auto& [offset, length] : parts) {
    EXPECT_EQ(offset, next);
    EXPECT_TRUE(length >= kMiB / 2 || offset + length == 4 * kMiB + 10);
    next = offset + length;
  }
  EXPECT_EQ(next, 4 * kMiB + 10);

  complete(0);
  post_all();
  EXPECT_EQ(raised(0) + raised(1), 0U) << "counted although parts of it are on their way";
  complete(1);
  post_all();
  EXPECT_EQ(raised(0) + raised(1), 1U);
  EXPECT_TRUE(events.poll(1).empty());
  run();
  expect_done(1);
  EXPECT_EQ(raised(0) + raised(1), 1U);
  expect_clean();
}

TEST_F(Scheduler, ASplitWriteThatIsCancelledIsDoneIfItIsCounted) {
  connect(2);
  for (const bool counted : {false, true}) {
    const auto transfer = open();
    write(*transfer, 2 * kMiB);
    post_all();
    complete(0);
    complete(1);  // its immediate is due
    if (counted) post_all();
    scheduler.cancel(*transfer);
    run();
    const std::vector<Event> events_told = events.poll(2);
    ASSERT_EQ(events_told.size(), 1U);
    EXPECT_EQ(events_told[0].kind, EventKind::kTransferCancelled);
    EXPECT_EQ(raised(0) + raised(1), counted ? 1U : 0U);
    EXPECT_EQ(events_told[0].pages, counted ? 1U : 0U);
  }
  expect_clean();
}

TEST_F(Scheduler, AWriteLongerThanTheLanesLongestPageIsSplitHoweverSmall) {
  connect(2);
  peer->limits.page_bytes = 8192;
  const auto transfer = open();
  write(*transfer, 20000);
  write(*transfer, 8192);
  scheduler.seal(*transfer);
  run();
  uint64_t bytes = 0;
  for (size_t i = 0; i < 2; ++i) {
    for (const auto& posting : postings(i)) {
      EXPECT_LE(posting.page_bytes, 8192U);
      bytes += posting.bytes();
    }
  }
  EXPECT_EQ(bytes, 28192U);
  EXPECT_EQ(raised(0) + raised(1), 2U);
  expect_done(2);
  expect_clean();
}

TEST_F(Scheduler, PagesLongerThanTheLaneTakesFailTheirTransferAlone) {
  connect(1);
  peer->limits.page_bytes = 8192;
  const auto transfer = open();
  write_pages(*transfer, 2, 8193);
  const auto other = open();
  write_pages(*other, 2, 8192);
  for (const auto& each : {transfer, other}) scheduler.seal(*each);
  run();
  ASSERT_EQ(postings(0).size(), 1U);
  for (const Event& event : events.poll(2)) {
    EXPECT_EQ(event.kind, event.id == 1 ? EventKind::kTransferFailed : EventKind::kTransferDone);
    if (!event.error) continue;
    EXPECT_EQ(event.error->code, ErrorCode::kOutOfRange);
  }
  expect_clean();
}

TEST_F(Scheduler, ASmallWriteAndOneOverASingleLinkStayWhole) {
  connect(2);
  const auto transfer = open();
  write(*transfer, kMiB - 1);
  link(1).state = Link::State::kOut;
  write(*transfer, 4 * kMiB);
  post_all();
  ASSERT_EQ(postings(0).size(), 2U);
  EXPECT_EQ(raised(0), 2U);
}

TEST_F(Scheduler, ASplitWriteWithoutAnImmediateRaisesNothing) {
  connect(2);
  const auto transfer = open();
  write(*transfer, 2 * kMiB, std::nullopt);
  scheduler.seal(*transfer);
  run();
  expect_done(1);
  EXPECT_EQ(postings(0).size() + postings(1).size(), 4U);
  EXPECT_EQ(raised(0) + raised(1), 0U);
}

// --- A link that breaks

TEST_F(Scheduler, WhatWasCountedIsDoneAndNothingIsWrittenAgain) {
  connect(2);
  const auto transfer = open();
  write_pages(*transfer, 128, 1024);
  scheduler.seal(*transfer);
  post_all();
  complete(0, &kBroken);
  complete(1);
  EXPECT_EQ(scheduler.unsettled_counters(link(0)), std::vector<uint32_t>{kCounter});
  EXPECT_FALSE(ended().has_value());
  const std::vector<Landed> landed = {{.counter = kCounter, .pages = 64}};
  scheduler.recover(*peer, link(0), landed);
  scheduler.settle();
  expect_done(128);
  EXPECT_EQ(postings(1).size(), 1U);
  EXPECT_EQ(stats.pages_rewritten.load(), 0U);
  expect_clean();
}

TEST_F(Scheduler, WhatIsMissingIsCountedOnceAllUnfinishedPagesAreWrittenAgain) {
  connect(2);
  const auto transfer = open();
  write_pages(*transfer, 256, 1024);  // two batches of 64 pages each
  scheduler.seal(*transfer);
  post_all();
  ASSERT_EQ(postings(0).size(), 2U);
  complete(1);
  complete(0, &kBroken);
  // 27 of the 128 pages landed and were counted. Which ones is unknown.
  const std::vector<Landed> landed = {{.counter = kCounter, .pages = 27}};
  scheduler.recover(*peer, link(0), landed);
  post_all();
  EXPECT_EQ(raised(1), 128U) << "counted before the pages are there";
  ASSERT_EQ(postings(1).size(), 4U);
  std::set<uint64_t> lost;
  std::set<uint64_t> again;
  for (const auto& posting : postings(0)) {
    for (const PageWrite& page : posting.pages) lost.insert(page.target_offset);
  }
  for (size_t i = 2; i < 4; ++i) {
    EXPECT_FALSE(postings(1)[i].immediate.has_value());
    EXPECT_EQ(postings(1)[i].rkey, 101U);
    for (const PageWrite& page : postings(1)[i].pages) again.insert(page.target_offset);
  }
  EXPECT_EQ(lost, again);
  // One of the two completes: still nothing is counted.
  scheduler.complete(postings(1)[2].work, nullptr);
  postings(1)[2].over = true;
  scheduler.settle();
  post_all();
  EXPECT_EQ(raised(1), 128U);
  EXPECT_FALSE(ended().has_value());
  run();
  EXPECT_EQ(raised(1), 128U + 101);
  expect_done(256);
  EXPECT_EQ(stats.pages_rewritten.load(), 128U);
  EXPECT_EQ(stats.pages_written.load(), 256U);
  expect_clean();
}

TEST_F(Scheduler, EarlierTransfersOfTheSameCounterAreInTheAccount) {
  connect(2);
  const auto first = open();
  write_pages(*first, 64, 1024);
  scheduler.seal(*first);
  post_all();
  complete(0);
  expect_done(64);
  const auto second = open();
  write(*second, 100);
  write(*second, 100);
  scheduler.seal(*second);
  post_all();
  complete(1);
  complete(0, &kBroken);
  const std::vector<Landed> landed = {{.counter = kCounter, .pages = 64}};
  scheduler.recover(*peer, link(0), landed);
  run();
  EXPECT_EQ(raised(1), 2U);  // its own one and the missing one
  expect_done(2);
}

TEST_F(Scheduler, TransfersThatShareACounterEndTogether) {
  connect(2);
  const auto first = open();
  const auto second = open();
  write(*first, 100);
  write(*first, 100);
  write(*second, 100);
  write(*second, 100);
  scheduler.seal(*first);
  scheduler.seal(*second);
  post_all();
  complete(1);
  complete(0, &kBroken);
  const std::vector<Landed> landed = {{.counter = kCounter, .pages = 1}};
  scheduler.recover(*peer, link(0), landed);
  post_and_settle();
  EXPECT_FALSE(ended().has_value());
  run();
  EXPECT_EQ(events.poll(8).size(), 2U);
  EXPECT_EQ(raised(1), 2U + 1);
  expect_clean();
}

TEST_F(Scheduler, PartsOfASplitWriteAndUncountedWritesGoAgainToo) {
  connect(2);
  const auto transfer = open();
  write(*transfer, 4 * kMiB);
  write_pages(*transfer, 10, 100, std::nullopt);
  scheduler.seal(*transfer);
  post_all();
  const std::vector<uint64_t> bytes = bytes_posted();
  complete(0, &kBroken);
  EXPECT_TRUE(scheduler.unsettled_counters(link(0)).empty());
  scheduler.recover(*peer, link(0), {});
  run();
  EXPECT_EQ(bytes_posted()[1], bytes[0] + bytes[1]);
  EXPECT_EQ(raised(1), 1U);
  expect_done(11);
  expect_clean();
}

TEST_F(Scheduler, AnImmediateAloneIsNotRewrittenButCounted) {
  connect(2);
  const auto transfer = open();
  scheduler.add(*transfer, Request::make(nullptr, nullptr, 0, kCounter, ImmediateOnly{5}));
  scheduler.seal(*transfer);
  post_all();
  ASSERT_EQ(raised(0), 5U);
  complete(0, &kBroken);
  const std::vector<Landed> landed = {{.counter = kCounter, .pages = 0}};
  scheduler.recover(*peer, link(0), landed);
  run();
  ASSERT_EQ(postings(1).size(), 1U);
  EXPECT_EQ(raised(1), 5U);
  expect_done(0);
  expect_clean();
}

// The receiver may have used counted pages, and which pages these are is unknown.
TEST_F(Scheduler, PagesThatMayHoldOtherBytesByNowAreNotWrittenAgain) {
  connect(2);
  for (const uint32_t counted : {0, 1, 63, 64}) {
    SCOPED_TRACE(counted);
    link(0).state = Link::State::kUp;
    link(0).posted.clear();
    link(0).refused.clear();
    link(1).state = Link::State::kOut;
    postings(0).clear();
    postings(1).clear();
    const auto transfer = open();
    write_pages(*transfer, 64, 1024);
    scheduler.seal(*transfer);
    post_all();
    complete(0, &kBroken);
    link(1).state = Link::State::kUp;
    const std::vector<Landed> landed = {{.counter = kCounter, .pages = counted, .acted_on = true}};
    scheduler.recover(*peer, link(0), landed);
    run();
    if (counted == 0 || counted == 64) {
      EXPECT_EQ(raised(1), 64 - counted);
      expect_done(64);
      continue;
    }
    const std::optional<Event> event = ended();
    ASSERT_TRUE(event.has_value());
    EXPECT_EQ(event->kind, EventKind::kTransferFailed);
    EXPECT_EQ(event->error->code, ErrorCode::kRefused);
    EXPECT_TRUE(event->quiesced);
    EXPECT_TRUE(postings(1).empty());
  }
  expect_clean();
}

// They overwrite nothing.
TEST_F(Scheduler, ImmediatesAloneAreRaisedAgainWhateverTheirReceiverDidMeanwhile) {
  connect(2);
  const auto transfer = open();
  scheduler.add(*transfer, Request::make(nullptr, nullptr, 0, kCounter, ImmediateOnly{5}));
  scheduler.seal(*transfer);
  post_all();
  complete(0, &kBroken);
  const std::vector<Landed> landed = {{.counter = kCounter, .pages = 2, .acted_on = true}};
  scheduler.recover(*peer, link(0), landed);
  run();
  EXPECT_EQ(raised(1), 3U);
  expect_done(0);
  expect_clean();
}

TEST_F(Scheduler, ALinkMayBreakUnderARecovery) {
  connect(3);
  const auto transfer = open();
  link(1).state = link(2).state = Link::State::kOut;
  write_pages(*transfer, 128, 1024);
  scheduler.seal(*transfer);
  post_all();
  complete(0, &kBroken);
  link(1).state = Link::State::kUp;
  const std::vector<Landed> landed = {{.counter = kCounter, .pages = 28}};
  scheduler.recover(*peer, link(0), landed);
  post_all();
  ASSERT_EQ(postings(1).size(), 2U);
  scheduler.complete(postings(1)[0].work, nullptr);  // one rewrite arrives, the second is lost with its link
  postings(1)[0].over = true;
  complete(1, &kBroken);
  EXPECT_TRUE(scheduler.unsettled_counters(link(1)).empty());
  link(2).state = Link::State::kUp;
  scheduler.recover(*peer, link(1), {});
  post_and_settle();
  ASSERT_EQ(postings(2).size(), 1U);
  complete(2);
  post_and_settle();
  EXPECT_EQ(raised(2), 100U);
  // And again, now during the counting itself: 64 of the 100 arrive.
  link(0).state = Link::State::kUp;
  complete(2, &kBroken);
  const std::vector<Landed> counted = {{.counter = kCounter, .pages = 64}};
  scheduler.recover(*peer, link(2), counted);
  run();
  EXPECT_EQ(raised(0), 128U + 36);
  expect_done(128);
  expect_clean();
}

TEST_F(Scheduler, ACancelledTransferIsNotWrittenAgain) {
  connect(2);
  const auto transfer = open();
  write_pages(*transfer, 128, 1024);
  post_all();
  complete(1);
  complete(0, &kBroken);
  scheduler.cancel(*transfer);
  scheduler.settle();
  EXPECT_FALSE(ended().has_value()) << "its writes may still land";
  const std::vector<Landed> landed = {{.counter = kCounter, .pages = 0}};
  scheduler.recover(*peer, link(0), landed);
  run();
  EXPECT_EQ(postings(1).size(), 1U);
  const std::optional<Event> event = ended();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->kind, EventKind::kTransferCancelled);
  EXPECT_TRUE(event->quiesced);
  expect_clean();
}

TEST_F(Scheduler, ACancelStopsARecoveryThatHasBegun) {
  connect(3);
  const auto transfer = open();
  link(1).state = link(2).state = Link::State::kOut;
  write_pages(*transfer, 128, 1024);
  post_all();
  complete(0, &kBroken);
  link(1).state = Link::State::kUp;
  const std::vector<Landed> landed = {{.counter = kCounter, .pages = 0}};
  scheduler.recover(*peer, link(0), landed);
  post_all();
  complete(1, &kBroken);  // its batches wait again
  link(2).state = Link::State::kUp;
  scheduler.recover(*peer, link(1), {});
  scheduler.cancel(*transfer);
  run();
  EXPECT_TRUE(postings(2).empty());
  const std::optional<Event> event = ended();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->kind, EventKind::kTransferCancelled);
  expect_clean();
}

// Accounts that cannot be settled exactly fail the transfer with a reason.
TEST_F(Scheduler, AnAccountThatDoesNotAddUpFailsTheTransfer) {
  struct Case {
    const char* name;
    Landed landed;
    bool refused;
  };
  const std::vector<Case> cases = {
      {"more posted than unsettled", {.counter = kCounter, .pages = 1}, false},
      {"more counted than posted", {.counter = kCounter, .pages = 200}, false},
      {"released", {.counter = kCounter, .pages = 70, .released = true}, false},
      {"unknown", {.counter = kCounter, .known = false}, false},
      {"another counter's", {.counter = kOther, .pages = 70}, false},
      {"beside a refused batch", {.counter = kCounter, .pages = 70}, true},
  };
  connect(2);
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    link(0).state = Link::State::kUp;
    link(0).posted.clear();
    link(0).refused.clear();
    link(1).state = Link::State::kOut;
    postings(0).clear();
    const auto earlier = open();
    write_pages(*earlier, 64, 1024);
    scheduler.seal(*earlier);
    post_and_settle();
    scheduler.complete(postings(0)[0].work, one.refused ? &kDenied : nullptr);
    postings(0)[0].over = true;
    scheduler.settle();
    EXPECT_TRUE(ended().has_value());
    const auto transfer = open();
    write_pages(*transfer, 64, 1024);
    scheduler.seal(*transfer);
    post_all();
    complete(0, &kBroken);
    link(1).state = Link::State::kUp;
    scheduler.recover(*peer, link(0), std::span(&one.landed, 1));
    run();
    const std::optional<Event> event = ended();
    ASSERT_TRUE(event.has_value());
    EXPECT_EQ(event->kind, EventKind::kTransferFailed);
    EXPECT_TRUE(event->quiesced);
    EXPECT_TRUE(postings(1).empty());
    expect_clean();
  }
}

TEST_F(Scheduler, AWriteThatIsRefusedFailsAtOnceAndTakesNoLinkOut) {
  connect(2);
  const auto transfer = open();
  write(*transfer, 100);
  scheduler.seal(*transfer);
  post_all();
  const TransferScheduler::Ended lost = scheduler.complete(postings(0)[0].work, &kDenied);
  EXPECT_EQ(lost.link, nullptr);
  scheduler.settle();
  EXPECT_EQ(ended()->kind, EventKind::kTransferFailed);
}

// If a refusal breaks the link, as it does a queue pair, no more writes go to that region, over any link.
TEST_F(Scheduler, NothingIsPostedToARegionThatWasRefused) {
  connect(3);
  const auto other =
      std::make_shared<const RemoteRegion>(2, 1, 0, 0, memory.size(), std::vector<uint64_t>{200, 201, 202});
  const auto add = [&](Transfer& transfer, const std::shared_ptr<const RemoteRegion>& to, uint32_t counter) {
    scheduler.add(transfer, Request::make(source, to, 100, counter, SingleWrite{0, 0, 0}));
    scheduler.seal(transfer);
  };
  const auto refused = open();
  const auto beside = open();
  const auto elsewhere = open();
  add(*refused, target, kCounter);
  add(*beside, target, kOther);
  add(*elsewhere, other, Immediate{11, 3, 1}.encode());
  post_all();
  ASSERT_EQ(postings(0).size(), 3U);
  postings(0)[0].over = true;
  scheduler.complete(postings(0)[0].work, &kDenied);
  complete(0, &kBroken);
  std::vector<Landed> landed;
  for (const uint32_t counter : scheduler.unsettled_counters(link(0))) landed.push_back({.counter = counter});
  ASSERT_EQ(landed.size(), 2U);
  scheduler.recover(*peer, link(0), landed);
  const auto later = open();
  add(*later, target, kOther);
  run();
  for (const size_t i : {1U, 2U}) {
    for (const FakeDomain::Posting& posting : postings(i)) {
      EXPECT_TRUE(posting.page_bytes == 0 || posting.rkey == 200 + i) << posting.rkey;
    }
  }
  std::map<TransferId, Event> events_of;
  for (Event& event : events.poll(8)) events_of.emplace(event.id, std::move(event));
  for (const auto& transfer : {refused, beside, later}) {
    ASSERT_EQ(events_of.at(transfer->id).kind, EventKind::kTransferFailed);
    EXPECT_EQ(events_of.at(transfer->id).error->code, ErrorCode::kUnknownRegion);
  }
  EXPECT_EQ(events_of.at(elsewhere->id).kind, EventKind::kTransferDone);
  expect_clean();
}

TEST_F(Scheduler, OverASingleLinkAnErrorFailsTheTransferAtOnce) {
  connect(1);
  const auto transfer = open();
  write(*transfer, 100);
  scheduler.seal(*transfer);
  post_all();
  EXPECT_EQ(scheduler.complete(postings(0)[0].work, &kBroken).link, nullptr);
  scheduler.settle();
  const std::optional<Event> event = ended();
  EXPECT_EQ(event->kind, EventKind::kTransferFailed);
  EXPECT_FALSE(event->quiesced);
  expect_clean();
}

TEST_F(Scheduler, WhenThePeerGoesDownWhatWaitedFails) {
  connect(2);
  const auto transfer = open();
  write_pages(*transfer, 256, 1024);
  scheduler.seal(*transfer);
  post_all();
  complete(0, &kBroken);
  const std::vector<Landed> landed = {{.counter = kCounter, .pages = 0}};
  scheduler.recover(*peer, link(0), landed);  // a recovery in flight
  scheduler.fail_peer(*peer, kBroken);
  for (auto& posting : postings(1)) {
    if (!posting.over) scheduler.complete(posting.work, &kBroken);
  }
  scheduler.settle();
  const std::optional<Event> event = ended();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->kind, EventKind::kTransferFailed);
  expect_clean();
}

TEST_F(Scheduler, ASourceThatIsDeregisteredMeanwhileFailsTheRecovery) {
  connect(2);
  const auto transfer = open();
  write_pages(*transfer, 64, 1024);
  scheduler.seal(*transfer);
  post_all();
  complete(0, &kBroken);
  EXPECT_EQ(lies_in->batches_in_flight, 1U);  // deregistration waits for it
  lies_in->live = false;
  const std::vector<Landed> landed = {{.counter = kCounter, .pages = 0}};
  scheduler.recover(*peer, link(0), landed);
  run();
  const std::optional<Event> event = ended();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->kind, EventKind::kTransferFailed);
  EXPECT_EQ(event->error->code, ErrorCode::kUnknownRegion);
  expect_clean();
}

// --- Messages

TEST_F(Scheduler, UnreadMessagesStopNoWrites) {
  connect(1);
  std::vector<std::shared_ptr<Transfer>> open_transfers;
  for (int i = 0; i < 20; ++i) {
    open_transfers.push_back(open());
    scheduler.add(*open_transfers.back(),
                  Request::make(nullptr, nullptr, 0, std::nullopt, MessageWrite{Bytes(kUserHeaderBytes + 1)}));
    scheduler.seal(*open_transfers.back());
  }
  const auto transfer = open();
  write(*transfer, 100);
  post_all();
  EXPECT_EQ(raised(0), 1U);
  EXPECT_EQ(postings(0).size(), 9U);  // 8 messages and the write
  const std::array internal{std::byte{2}};
  EXPECT_TRUE(scheduler.send(*peer, internal));
  run();
  EXPECT_EQ(postings(0).size(), 22U);
}

TEST_F(Scheduler, AMessageOnABrokenLinkIsSentAgainUnderItsNumberAndNewOnesWait) {
  connect(2);
  const auto message = [&] {
    const auto transfer = open();
    scheduler.add(*transfer,
                  Request::make(nullptr, nullptr, 0, std::nullopt, MessageWrite{Bytes(kUserHeaderBytes + 1)}));
    scheduler.seal(*transfer);
    return transfer;
  };
  const auto first = message();
  post_all();
  ASSERT_EQ(postings(0).size(), 1U);
  complete(0, &kBroken);
  const auto second = message();
  post_all();
  EXPECT_TRUE(postings(1).empty());
  scheduler.recover(*peer, link(0), {});
  post_all();
  ASSERT_EQ(postings(1).size(), 1U);
  EXPECT_EQ(postings(1)[0].message, postings(0)[0].message);
  run();
  ASSERT_EQ(postings(1).size(), 2U);
  EXPECT_NE(postings(1)[1].message, postings(0)[0].message);
  EXPECT_EQ(events.poll(8).size(), 2U);
  expect_clean();
}

}  // namespace
}  // namespace kvc::test
