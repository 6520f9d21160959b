// Defects found in the code published with the paper, each with the test that would have found it here. Tests of a
// defect in one provider are beside that provider's tests and named after the defect.
//
//   | #  | the published code                                                      | test                                |
//   | 1  | builds operation i for one domain, posts it on another: wrong key       | D01 below                           |
//   | 2  | takes a peer's address by chunk, not by domain: crosses rails           | D02 below                           |
//   | 3  | trusts the opcode of a failed completion, casts its wr_id to a pointer  | verbs_test.cc, PublishedDefect03    |
//   | 4  | answers a handshake before its own queue pairs are ready                | verbs_test.cc, PublishedDefect04    |
//   | 5  | port 1, GID 0, pkey 0; the immediate in host byte order                 | verbs_test.cc, PublishedDefect05    |
//   | 6  | takes the peer's packet sequence number for its own; both constant      | verbs_test.cc, PublishedDefect06    |
//   | 7  | an immediate that comes before its target is set is lost                | D07 below                           |
//   | 8  | a finished counter stays: a later immediate of its number meets it      | D08 below                           |
//   | 9  | an operation that waited for room never returns its context             | D09 below                           |
//   | 10 | a peer that is still connecting is taken for a connected one            | D10 below                           |
//   | 11 | a lost handshake is never repeated, a broken queue pair never replaced  | verbs_test.cc, PublishedDefect11    |
//   | 12 | unregistering reaches one worker only; stale length after re-allocation | D12 below                           |
//   | 13 | an empty page list never completes; a refused one leaves its entry      | D13 below                           |
//   | 14 | a callback that fails stops the engine; callbacks run under a lock      | D14 below                           |

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <stdexcept>

#include "lane/immediate.h"
#include "tests/rig.h"

namespace kvc::test::published_defects {
namespace {

class PublishedDefects : public testing::TestWithParam<std::string> {
 protected:
  std::string provider() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Lanes, PublishedDefects, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

constexpr size_t kPage = 1024;

// All pages of the sender's region, in random order, to as many places of the receiver's.
PagedWrite all_pages(const Pair& pair, size_t pages, uint64_t seed, std::optional<uint32_t> immediate) {
  PagedWrite write;
  write.page_bytes = kPage;
  write.source = pair.sender.region;
  write.target = pair.receiver_region;
  write.source_pages = {shuffled(pages, pages, seed), kPage, 0};
  write.target_pages = {shuffled(pages, pages, seed + 1), kPage, 0};
  write.immediate = immediate;
  return write;
}

void expect_written(const Pair& pair, const PagedWrite& write) {
  for (size_t i = 0; i < write.source_pages.indices.size(); ++i) {
    ASSERT_EQ(std::memcmp(pair.receiver.data() + static_cast<size_t>(write.target_pages.indices[i]) * kPage,
                          pair.sender.data() + static_cast<size_t>(write.source_pages.indices[i]) * kPage, kPage),
              0)
        << "page " << i;
  }
}

// Every domain has its own key for the region. Requests smaller than the number of domains, one after another, use the
// domains in turn. Each must reach its domain with that domain's key.
TEST_P(PublishedDefects, D01_EveryDomainPostsWithItsOwnKey) {
  constexpr size_t kPages = 24;
  Pair pair(provider(), kPages * kPage, 3, 3);
  fill_random(pair.sender.data(), kPages * kPage, 1);
  const auto [set, immediate] = pair.counter(kPages);
  const PagedWrite all = all_pages(pair, kPages, 2, immediate);
  size_t next = 0;
  for (const size_t count : {1, 2, 1, 4, 3, 1, 5, 2, 1, 4}) {
    PagedWrite some = all;
    const auto part = [&](const std::vector<int64_t>& from) {
      const auto first = from.begin() + static_cast<std::ptrdiff_t>(next);
      return std::vector<int64_t>(first, first + static_cast<std::ptrdiff_t>(count));
    };
    some.source_pages.indices = part(all.source_pages.indices);
    some.target_pages.indices = part(all.target_pages.indices);
    next += count;
    const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
    must(pair.sender.engine->write_pages(transfer, some));
    must(pair.sender.engine->seal(transfer));
    const Event done = ended(*pair.sender.engine, transfer);
    ASSERT_EQ(done.kind, EventKind::kTransferDone) << (done.error ? done.error->to_string() : "");
  }
  ASSERT_EQ(next, kPages);
  must(pair.receiver.engine->wait_counters(set, kLimit));
  EXPECT_EQ(pair.count(set), kPages);
  expect_written(pair, all);
}

// Immediates without pages need no key. Each must still travel from its domain to that domain's peer, also if the two
// sides have different numbers of domains.
TEST_P(PublishedDefects, D02_ImmediatesAloneReachTheirPeerOverEveryDomain) {
  constexpr uint64_t kBarriers = 12;
  Pair pair(provider(), kPage, 3, 2);
  const PeerGroupId group = must(pair.sender.engine->add_peer_group({pair.to_receiver}));
  const auto [set, immediate] = pair.counter(kBarriers);
  std::vector<TransferId> barriers;
  for (uint64_t i = 0; i < kBarriers; ++i) barriers.push_back(must(pair.sender.engine->barrier(group, {immediate})));
  for (const TransferId barrier : barriers) {
    const Event done = ended(*pair.sender.engine, barrier);
    EXPECT_EQ(done.kind, EventKind::kTransferDone) << (done.error ? done.error->to_string() : "");
  }
  must(pair.receiver.engine->wait_counters(set, kLimit));
  EXPECT_EQ(pair.count(set), kBarriers);
  const EngineStats stats = pair.receiver.engine->stats();
  EXPECT_EQ(stats.immediates_received, kBarriers);
  EXPECT_EQ(stats.immediates_stale, 0U);
}

TEST_P(PublishedDefects, D07_AnImmediateBeforeItsTargetIsCounted) {
  Pair pair(provider(), kPage);
  CounterSet set = must(pair.receiver.engine->alloc_counters(1));
  for (int i = 0; i < 3; ++i) {
    const TransferId transfer = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                   pair.receiver_region, 0, kPage, set.immediates[0]));
    // Done: the write and its immediate have arrived, or will arrive without further work of the sender.
    ASSERT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferDone);
  }
  must(pair.receiver.engine->expect(set.id, {3}));
  must(pair.receiver.engine->wait_counters(set.id, kLimit));
  EXPECT_EQ(pair.count(set.id), 3U);
}

// The same slot repeatedly: immediates for its former owner do not raise the new owner's count.
TEST_P(PublishedDefects, D08_AFinishedCounterLeavesNothingForTheNextOwnerOfItsNumber) {
  Pair pair(provider(), kPage);
  const auto write = [&](uint32_t immediate) {
    const TransferId transfer = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                   pair.receiver_region, 0, kPage, immediate));
    ASSERT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferDone);
  };
  // All slots are handed out once before one is reused.
  CounterSet first = must(pair.receiver.engine->alloc_counters(1));
  CounterSet rest = must(pair.receiver.engine->alloc_counters((1U << Immediate::kSlotBits) - 1));
  const uint32_t number = first.immediates[0];
  must(pair.receiver.engine->expect(first.id, {1}));
  write(number);
  must(pair.receiver.engine->wait_counters(first.id, kLimit));
  must(pair.receiver.engine->release_counters(first.id));
  CounterSet second = must(pair.receiver.engine->alloc_counters(1));
  ASSERT_EQ(Immediate::decode(second.immediates[0]).slot, Immediate::decode(number).slot);
  ASSERT_NE(second.immediates[0], number);
  must(pair.receiver.engine->expect(second.id, {1}));
  write(number);  // late, for the former owner
  write(second.immediates[0]);
  must(pair.receiver.engine->wait_counters(second.id, kLimit));
  EXPECT_EQ(pair.count(second.id), 1U);
  must(pair.receiver.engine->release_counters(second.id));
  must(pair.receiver.engine->release_counters(rest.id));
  EXPECT_EQ(pair.receiver.engine->stats().counters_allocated, 0U);
}

// Several requests, each larger than the limit in flight, so that all of them wait for room.
TEST_P(PublishedDefects, D09_WhatWaitedForRoomEndsAndLeavesNothingBehind) {
  constexpr size_t kBytes = 24 << 20;
  Pair pair(provider(), kBytes);
  fill_random(pair.sender.data(), kBytes, 3);
  std::vector<TransferId> transfers;
  for (int i = 0; i < 3; ++i) {
    transfers.push_back(must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                           pair.receiver_region, 0, kBytes, std::nullopt)));
  }
  for (const TransferId transfer : transfers) {
    EXPECT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferDone);
  }
  EXPECT_EQ(std::memcmp(pair.sender.data(), pair.receiver.data(), kBytes), 0);
  EXPECT_EQ(pair.sender.engine->stats().transfers_open, 0U);
  // No transfer uses the source any more.
  must(pair.sender.engine->deregister_memory(pair.sender.region, kLimit));
  EXPECT_EQ(pair.sender.engine->stats().regions, 0U);
}

TEST_P(PublishedDefects, D10_APeerThatIsStillConnectingIsNotTakenForAConnectedOne) {
  Side first(config("first", provider()), kPage);
  Side second(config("second", provider()), kPage);
  fill_random(second.data(), kPage, 4);
  Handshake offer = must(first.engine->offer("second"));
  const Result<TransferId> early = first.engine->open_transfer(offer.peer);
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().code, ErrorCode::kInvalidArgument);
  // The accepting side may write as soon as it has accepted, although the transport is not up before complete().
  Handshake answer = must(second.engine->accept("first", offer.bytes));
  const RemoteRegionId target =
      must(second.engine->import_region(answer.peer, must(first.engine->region_descriptor(first.region))));
  CounterSet set = must(first.engine->alloc_counters(1));
  must(first.engine->expect(set.id, {1}));
  const TransferId transfer =
      must(second.engine->write_one(answer.peer, second.region, 0, target, 0, kPage, set.immediates[0]));
  must(first.engine->complete(offer.peer, answer.bytes));
  must(first.engine->wait_counters(set.id, kLimit));
  EXPECT_EQ(ended(*second.engine, transfer).kind, EventKind::kTransferDone);
  EXPECT_EQ(std::memcmp(first.data(), second.data(), kPage), 0);
}

// The same address three times, each time with another length, over several domains. Each registration has its own keys
// and its own length on every domain.
TEST_P(PublishedDefects, D12_MemoryRegisteredAgainHasItsNewLengthAndKeysEverywhere) {
  constexpr size_t kDomains = 2;
  constexpr size_t kBytes = 8 * kPage;
  Pair pair(provider(), kBytes, kDomains, kDomains);
  std::vector<std::byte> source(kBytes);
  std::vector<std::byte> target(kBytes);
  const RegionId from = must(pair.sender.engine->register_memory(source.data(), source.size()));
  const auto write = [&](RemoteRegionId region, uint64_t offset) {
    return pair.sender.engine->write_one(pair.to_receiver, from, 0, region, offset, kPage, std::nullopt);
  };
  for (const size_t bytes : {kBytes / 2, kBytes, kBytes / 4}) {
    fill_random(source.data(), kPage, bytes);
    const RegionId region = must(pair.receiver.engine->register_memory(target.data(), bytes));
    const RemoteRegionId imported = must(
        pair.sender.engine->import_region(pair.to_receiver, must(pair.receiver.engine->region_descriptor(region))));
    for (size_t turn = 0; turn < kDomains; ++turn) {  // over each domain once
      const Event done = ended(*pair.sender.engine, must(write(imported, bytes - kPage)));
      ASSERT_EQ(done.kind, EventKind::kTransferDone) << (done.error ? done.error->to_string() : "");
    }
    EXPECT_EQ(std::memcmp(target.data() + bytes - kPage, source.data(), kPage), 0);
    const Result<TransferId> beyond = write(imported, bytes - kPage + 1);
    ASSERT_FALSE(beyond.ok());
    EXPECT_EQ(beyond.error().code, ErrorCode::kOutOfRange);
    must(pair.receiver.engine->deregister_memory(region, kLimit));
  }
  EXPECT_EQ(pair.receiver.engine->stats().regions, 1U);  // the pair's region
}

TEST_P(PublishedDefects, D13_AnEmptyPageListEndsAndARefusedOneLeavesNothing) {
  Pair pair(provider(), kPage);
  TransferEngine& engine = *pair.sender.engine;
  const TransferId empty = must(engine.open_transfer(pair.to_receiver));
  must(engine.write_pages(empty, all_pages(pair, 0, 1, std::nullopt)));
  must(engine.seal(empty));
  EXPECT_EQ(ended(engine, empty).kind, EventKind::kTransferDone);

  const TransferId refused = must(engine.open_transfer(pair.to_receiver));
  PagedWrite unknown = all_pages(pair, 1, 1, std::nullopt);
  unknown.target = pair.receiver_region + 1000;
  EXPECT_EQ(engine.write_pages(refused, unknown).error().code, ErrorCode::kUnknownRegion);
  must(engine.seal(refused));
  EXPECT_EQ(ended(engine, refused).kind, EventKind::kTransferDone);
  EXPECT_FALSE(engine.write_one(pair.to_receiver, pair.sender.region, 0, unknown.target, 0, kPage, std::nullopt).ok());
  EXPECT_EQ(engine.stats().transfers_open, 0U);
}

TEST_P(PublishedDefects, D14_ACallbackThatFailsStopsNothingAndMayCallTheEngine) {
  Pair pair(provider(), kPage);
  TransferEngine& engine = *pair.sender.engine;
  const auto write = [&](EventCallback callback) {
    return engine.write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, kPage, std::nullopt,
                            std::move(callback));
  };
  must(write([](const Event&) { throw std::runtime_error("a user's mistake"); }));
  // A callback that opens another transfer would wait without limit if the transfer engine held any lock meanwhile.
  std::promise<EventKind> nested;
  must(write([&](const Event&) { must(write([&](const Event& event) { nested.set_value(event.kind); })); }));
  auto answer = nested.get_future();
  ASSERT_EQ(answer.wait_for(kLimit), std::future_status::ready);
  EXPECT_EQ(answer.get(), EventKind::kTransferDone);
  EXPECT_EQ(engine.stats().callback_errors, 1U);
}

}  // namespace
}  // namespace kvc::test::published_defects
