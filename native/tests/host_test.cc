// The host provider between two domains of one process: data, counting, back-pressure, fences, hostile bytes.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

#include "host_test_support.h"

namespace kvc::host {
namespace {

struct Shape {
  uint64_t page_bytes;
  size_t pages;
};

class HostShapes : public testing::TestWithParam<std::tuple<Backing, Shape>> {};

TEST_P(HostShapes, PagesArriveInPlaceAndNothingElseChanges) {
  const auto [backing, shape] = GetParam();
  Pair pair(backing, 8 << 20);
  pair.a.fill(1);
  pair.b.fill(2);
  pair.connect();
  const uint64_t stride = shape.page_bytes + 5;
  std::vector<uint64_t> from(pair.a.bytes / stride);
  std::iota(from.begin(), from.end(), 0);
  std::vector<uint64_t> to = from;
  std::mt19937 random(3);
  std::shuffle(from.begin(), from.end(), random);
  std::shuffle(to.begin(), to.end(), random);
  TestBatch batch{.page_bytes = shape.page_bytes, .pages = {}};
  std::vector<std::byte> expected = pair.b.contents();
  for (size_t i = 0; i < shape.pages; ++i) {
    batch.pages.emplace_back(from[i] * stride, to[i] * stride);
    std::memcpy(expected.data() + to[i] * stride, pair.a.memory + from[i] * stride, shape.page_bytes);
  }
  pair.b.sink.on_arrival = [&](uint32_t) {
    EXPECT_EQ(pair.b.contents(), expected) << "counted before all bytes were in place";
  };

  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b.rkey, batch), Posted::kYes);
  run_until(pair.both(), [&] { return pair.b.sink.counted > 0 && !pair.a.sink.completed.empty(); }, "the batch");
  EXPECT_TRUE(pair.a.sink.succeeded(1));
  EXPECT_EQ(pair.b.contents(), expected);
  EXPECT_EQ(pair.b.sink.immediates, std::vector{(Immediate{7, 3, static_cast<uint32_t>(shape.pages)}.encode())});
}

INSTANTIATE_TEST_SUITE_P(Sizes, HostShapes,
                         testing::Combine(testing::Values(Backing::kPrivate, Backing::kMemfd),
                                          testing::Values(Shape{1, 1}, Shape{1, 64}, Shape{4095, 3}, Shape{4096, 64},
                                                          Shape{65536, 64}, Shape{(3 << 20) + 1, 2})));

TEST(Host, PagesThatFollowEachOtherAndZeroBytes) {
  Pair pair(Backing::kMemfd);
  pair.a.fill(1);
  pair.connect();
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1, .pages = {{0, 8192}, {4096, 12288}, {8192, 16384}, {0, 0}}});
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 2, .page_bytes = 0, .pages = {{0, 0}, {0, 1 << 20}}});
  run_until(pair.both(), [&] { return pair.b.sink.counted == 6; }, "both batches");
  EXPECT_EQ(std::memcmp(pair.b.memory + 8192, pair.a.memory, 12288), 0);
  EXPECT_EQ(std::memcmp(pair.b.memory, pair.a.memory, 4096), 0);
}

TEST(Host, BothEndsWriteAndUncountedRaisesNothing) {
  Pair pair;
  pair.connect();
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1, .counted = false});
  post(pair.b, kLinkOfB, pair.a.rkey, {.work = 2, .pages = {{0, 0}, {4096, 8192}}});
  run_until(pair.both(), [&] { return pair.a.sink.succeeded(1) && pair.a.sink.counted == 2; }, "both writes");
  run_idle(pair.both());
  EXPECT_TRUE(pair.b.sink.succeeded(2));
  EXPECT_EQ(pair.b.sink.counted, 0U);
}

TEST(Host, BatchesPostedBeforeTheLinkIsUpAreQueued) {
  Pair pair;
  const Bytes answer = pair.b.domain->accept(kLinkOfB, pair.a.domain->offer(kLinkOfA).value()).value();
  for (WorkId work = 0; work < kQueueDepth; ++work) {
    EXPECT_EQ(post(pair.b, kLinkOfB, pair.a.rkey, {.work = work}), Posted::kYes);
  }
  EXPECT_EQ(post(pair.b, kLinkOfB, pair.a.rkey, {.work = kQueueDepth}), Posted::kBusy);
  run_idle({pair.b.domain.get()});
  EXPECT_TRUE(pair.b.sink.completed.empty());
  // The offerer's worker need not know the answer yet.
  run_until(pair.both(), [&] { return pair.a.sink.counted == kQueueDepth; }, "the queue");
  EXPECT_EQ(post(pair.b, kLinkOfB, pair.a.rkey, {.work = kQueueDepth}), Posted::kYes);
  EXPECT_TRUE(pair.a.domain->complete(kLinkOfA, answer).ok());
}

TEST(Host, AnIdleDomainSleepsAndAWriteWakesIt) {
  Pair pair;
  pair.connect();
  pollfd entry{pair.b.domain->fd(), POLLIN, 0};
  for (WorkId work = 1; work <= 3; ++work) {
    ASSERT_TRUE(pair.b.domain->prepare_sleep());
    EXPECT_EQ(::poll(&entry, 1, 0), 0) << "nothing to do, and yet readable";
    post(pair.a, kLinkOfA, pair.b.rkey, {.work = work});
    ASSERT_TRUE(pair.a.sink.succeeded(work)) << "a small write is done within post()";
    EXPECT_EQ(::poll(&entry, 1, 10000), 1);
    EXPECT_TRUE(pair.b.domain->poll());
    EXPECT_EQ(pair.b.sink.counted, work);
    run_idle(pair.both());
  }
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 4});
  EXPECT_FALSE(pair.b.domain->prepare_sleep()) << "an immediate is there";
}

TEST(Host, AHugePageIsWrittenInBoundedTurns) {
  Pair pair(Backing::kMemfd, 16 << 20);
  pair.a.fill(5);
  pair.connect();
  post(pair.a, kLinkOfA, pair.b.rkey, {.page_bytes = 16 << 20});
  size_t turns = 0;
  for (; pair.a.sink.completed.empty() && turns < 1000; ++turns) {
    EXPECT_FALSE(turns > 0 && pair.a.domain->prepare_sleep()) << "asleep over half a page";
    pair.a.domain->poll();
  }
  EXPECT_GE(turns, (16U << 20) / kChunkBytes);
  run_idle(pair.both());
  EXPECT_EQ(pair.b.sink.counted, 1U);
  EXPECT_EQ(pair.a.contents(), pair.b.contents());
}

TEST(Host, AFullRingHoldsTheSenderBackAndRoomWakesIt) {
  Pair pair;
  pair.connect();
  WorkId posted = 0;
  while (posted < kRingEntries + 100) {
    if (post(pair.a, kLinkOfA, pair.b.rkey, {.work = posted, .page_bytes = 8}) == Posted::kBusy) break;
    ++posted;
  }
  EXPECT_EQ(pair.a.sink.completed.size(), kRingEntries);
  EXPECT_EQ(posted, kRingEntries + kQueueDepth);
  pair.a.domain->poll();
  ASSERT_TRUE(pair.a.domain->prepare_sleep()) << "nothing to do until there is room";
  pollfd entry{pair.a.domain->fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 0), 0);
  pair.b.domain->poll();
  EXPECT_EQ(::poll(&entry, 1, 10000), 1);
  run_until(pair.both(), [&] { return pair.b.sink.immediates.size() == posted; }, "every immediate");
  EXPECT_EQ(pair.a.sink.completed.size(), posted);
}

TEST(Host, ASinkMayPostFromACompletion) {
  Pair pair;
  pair.connect();
  pair.a.sink.on_completion = [&](WorkId work) {
    if (work == 5000) return;
    EXPECT_EQ(post(pair.a, kLinkOfA, pair.b.rkey, {.work = work + 1, .page_bytes = 8}), Posted::kYes);
  };
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1, .page_bytes = 8});
  run_until(pair.both(), [&] { return pair.b.sink.counted == 5000; }, "the chain");
}

TEST(Host, TwoWorkersOfOneProcess) {
  for (const Backing backing : {Backing::kPrivate, Backing::kMemfd}) {
    constexpr uint32_t kRounds = 200;
    Pair pair(backing);
    pair.connect();
    std::thread receiver([&] {
      for (uint32_t round = 1; round <= kRounds; ++round) {
        run_until({pair.b.domain.get()}, [&] { return pair.b.sink.counted == 2 * round; }, "a round");
        EXPECT_EQ(pair.b.memory[4096], static_cast<std::byte>(round));
        std::memset(pair.b.memory, 0, pair.b.bytes);
        post(pair.b, kLinkOfB, pair.a.rkey, {.work = round, .page_bytes = 0});
      }
      run_until({pair.b.domain.get()}, [&] { return pair.b.domain->deregister_region(pair.b.rkey); }, "the end");
    });
    for (uint32_t round = 1; round <= kRounds; ++round) {
      std::memset(pair.a.memory, static_cast<int>(round), pair.a.bytes);
      post(pair.a, kLinkOfA, pair.b.rkey, {.work = round, .pages = {{0, 4096}, {8192, 4096}}});
      run_until({pair.a.domain.get()}, [&] { return pair.a.sink.counted == round; }, "the answer");
    }
    receiver.join();
    EXPECT_EQ(pair.a.sink.completed.size(), kRounds);
  }
}

TEST(Host, ImpossibleBatchesFailAndWriteNothing) {
  Pair pair;
  pair.a.fill(1);
  pair.connect();
  const std::vector<std::byte> before = pair.b.contents();
  const uint64_t end = pair.b.bytes;
  const auto fails = [&](LinkId link, uint64_t rkey, const TestBatch& batch) {
    EXPECT_EQ(post(pair.a, link, rkey, batch), Posted::kYes);
    run_idle(pair.both());
    return pair.a.sink.failure(batch.work);
  };
  EXPECT_EQ(fails(kLinkOfA, pair.b.rkey ^ (1ULL << 40), {.work = 1}), ErrorCode::kUnknownRegion);
  EXPECT_EQ(fails(kLinkOfA, pair.b.rkey + 1, {.work = 2}), ErrorCode::kUnknownRegion);
  EXPECT_EQ(fails(kLinkOfA, 0, {.work = 3}), ErrorCode::kUnknownRegion);
  EXPECT_EQ(fails(kLinkOfA, pair.b.rkey, {.work = 4, .pages = {{0, 0}, {0, end - 4095}}}), ErrorCode::kOutOfRange);
  EXPECT_EQ(fails(kLinkOfA, pair.b.rkey, {.work = 5, .pages = {{0, UINT64_MAX - 100}}}), ErrorCode::kOutOfRange);
  EXPECT_EQ(fails(kLinkOfA, pair.b.rkey, {.work = 6, .page_bytes = end + 1}), ErrorCode::kOutOfRange);
  EXPECT_EQ(fails(kLinkOfA, pair.b.rkey, {.work = 7, .pages = {}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(fails(kLinkOfA, pair.b.rkey, {.work = 8, .page_bytes = UINT64_MAX / 2, .pages = {3, {0, 0}}}),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(fails(99, pair.b.rkey, {.work = 9}), ErrorCode::kPeerDown);
  EXPECT_EQ(pair.b.contents(), before);
  EXPECT_TRUE(pair.b.sink.immediates.empty());
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 10, .pages = {{0, end - 4096}}});
  EXPECT_TRUE(pair.a.sink.succeeded(10)) << "the link works on";
}

// --- Memory

TEST(Host, RevokedKeysAreRefusedAndPlacesAreReused) {
  Pair pair;
  pair.connect();
  EXPECT_TRUE(pair.b.domain->deregister_region(pair.b.rkey));
  EXPECT_TRUE(pair.b.domain->deregister_region(pair.b.rkey)) << "idempotent";
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1});
  EXPECT_EQ(pair.a.sink.failure(1), ErrorCode::kUnknownRegion);
  const uint64_t again = pair.b.domain->register_region(pair.b.memory, pair.b.bytes, -1, 0).value();
  EXPECT_NE(again, pair.b.rkey);
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 2});
  EXPECT_EQ(pair.a.sink.failure(2), ErrorCode::kUnknownRegion) << "an old key leads to a new region";
  post(pair.a, kLinkOfA, again, {.work = 3});
  EXPECT_TRUE(pair.a.sink.succeeded(3));
}

TEST(Host, DeregisteringWaitsForAPeerInsideItsGate) {
  Pair pair;
  pair.connect();
  Channel& to_b = only_segment().to_acceptor;
  to_b.gate.store(1);
  EXPECT_FALSE(pair.b.domain->deregister_region(pair.b.rkey));
  EXPECT_FALSE(pair.b.domain->deregister_region(pair.b.rkey));
  to_b.gate.store(3);  // it has left the gate and is inside again: this time it has seen the key revoked
  EXPECT_TRUE(pair.b.domain->deregister_region(pair.b.rkey));
}

TEST(Host, RegionsOfOneMemfdAreMappedOnceAndForgotten) {
  Pair pair;
  pair.connect();
  auto shared = std::move(SharedMemory::create("host-test-late", 1 << 20).value());
  // Registered while the link is up, the second one at an offset that is no multiple of a memory page.
  const uint64_t low = pair.b.domain->register_region(shared.data(), 8192, shared.fd(), 0).value();
  const uint64_t high = pair.b.domain->register_region(shared.data() + 9000, 8192, shared.fd(), 9000).value();
  pair.a.fill(4);
  post(pair.a, kLinkOfA, low, {.work = 1, .pages = {{0, 4096}}});
  post(pair.a, kLinkOfA, high, {.work = 2, .pages = {{4096, 4096}}});
  run_until(pair.both(), [&] { return pair.b.sink.counted == 2; }, "both regions");
  EXPECT_EQ(std::memcmp(shared.data() + 4096, pair.a.memory, 4096), 0);
  EXPECT_EQ(std::memcmp(shared.data() + 9000 + 4096, pair.a.memory + 4096, 4096), 0);
  EXPECT_EQ(mappings_of("host-test-late").size(), 2U) << "ours and the peer's";
  EXPECT_TRUE(pair.b.domain->deregister_region(low));
  run_idle(pair.both());
  EXPECT_EQ(mappings_of("host-test-late").size(), 2U);
  EXPECT_TRUE(pair.b.domain->deregister_region(high));
  run_idle(pair.both());
  EXPECT_EQ(mappings_of("host-test-late").size(), 1U) << "the peer still maps it";
}

TEST(Host, BadRegionsAreRefused) {
  End end;
  const auto refused = [&](std::byte* base, uint64_t bytes, int memfd, uint64_t offset) {
    Result<uint64_t> result = end.domain->register_region(base, bytes, memfd, offset);
    return result.ok() ? std::nullopt : std::optional(result.error().code);
  };
  EXPECT_EQ(refused(nullptr, 10, -1, 0), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refused(end.memory, 0, -1, 0), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refused(end.memory, UINT64_MAX - 5, -1, 0), ErrorCode::kInvalidArgument);
  auto shared = std::move(SharedMemory::create("host-test", 8192).value());
  EXPECT_EQ(refused(shared.data(), 8192, shared.fd(), 1), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refused(shared.data(), 8192, shared.fd(), UINT64_MAX), ErrorCode::kInvalidArgument);
  const UniqueFd unsealable(memfd_create("host-test", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(unsealable.get(), 8192), 0);
  EXPECT_EQ(refused(shared.data(), 8192, unsealable.get(), 0), ErrorCode::kInvalidArgument);
  size_t registered = 1;
  while (!refused(end.memory, 8, -1, 0)) ++registered;
  EXPECT_EQ(registered, kMaxRegions);
  EXPECT_EQ(refused(end.memory, 8, -1, 0), ErrorCode::kResources);
}

// --- Fences

TEST(Host, FencingCompletesWhatIsQueuedAndTellsThePeer) {
  Pair pair;
  pair.connect();
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1, .page_bytes = 1 << 20});
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
  EXPECT_EQ(pair.a.sink.failure(1), ErrorCode::kPeerDown);
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA)) << "idempotent";
  EXPECT_TRUE(pair.a.sink.down.empty()) << "the caller knows";
  run_until(pair.both(), [&] { return !pair.b.sink.down.empty(); }, "the other end's news");
  EXPECT_EQ(pair.b.sink.down[0].link, kLinkOfB);
  EXPECT_EQ(pair.b.sink.down[0].error.code, ErrorCode::kPeerDown);
  EXPECT_TRUE(pair.b.sink.down[0].fenced);
  post(pair.b, kLinkOfB, pair.a.rkey, {.work = 2});
  EXPECT_EQ(pair.b.sink.failure(2), ErrorCode::kPeerDown);
  run_idle(pair.both());
  EXPECT_TRUE(mappings_of("kvc-link").empty()) << "a fenced link's memory stays";
}

TEST(Host, AFenceWaitsForAPeerInsideItsGateAndOutlawsItAfterwards) {
  Pair pair;
  pair.connect();
  Channel& to_b = only_segment().to_acceptor;
  const uint64_t outside = to_b.gate.load();
  to_b.gate.store(outside + 1);
  EXPECT_FALSE(pair.b.domain->fence(kLinkOfB));
  pair.b.domain->poll();
  EXPECT_FALSE(pair.b.domain->fence(kLinkOfB));
  to_b.gate.store(outside + 2);
  // Not yet known to be fenced, the peer writes: it must not.
  const std::vector<std::byte> before = pair.b.contents();
  pair.a.fill(9);
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1});
  EXPECT_EQ(pair.a.sink.failure(1), ErrorCode::kPeerDown);
  ASSERT_EQ(pair.a.sink.down.size(), 1U);
  EXPECT_TRUE(pair.a.sink.down[0].fenced);
  EXPECT_TRUE(pair.b.domain->fence(kLinkOfB));
  run_idle(pair.both());
  EXPECT_EQ(pair.b.contents(), before);
  EXPECT_TRUE(pair.b.sink.immediates.empty());
}

TEST(Host, AnOfferThatIsFencedCannotBeAccepted) {
  Pair pair;
  const Bytes offer = pair.a.domain->offer(kLinkOfA).value();
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
  ASSERT_TRUE(pair.b.domain->accept(kLinkOfB, offer).ok());
  run_until(pair.both(), [&] { return !pair.b.sink.down.empty(); }, "the refusal");
  run_idle(pair.both());
  EXPECT_TRUE(mappings_of("kvc-link").empty()) << "a fenced link's memory stays";
}

// --- Hostile bytes

TEST(Host, OffersOfOtherMachinesAndDeadProcessesLeadNowhere) {
  Pair pair;
  const Bytes good = pair.a.domain->offer(kLinkOfA).value();
  Bytes elsewhere = good;
  elsewhere[offsetof(Invitation, boot_id)] ^= std::byte{1};
  EXPECT_EQ(pair.b.domain->accept(1, elsewhere).error().code, ErrorCode::kNotReachable);
  Bytes nobody = good;
  nobody[offsetof(Invitation, socket) + 12] = std::byte{'x'};
  EXPECT_EQ(pair.b.domain->accept(1, nobody).error().code, ErrorCode::kNotReachable);
  Bytes other = good;
  other[offsetof(Invitation, version)] ^= std::byte{2};
  EXPECT_EQ(pair.b.domain->accept(1, other).error().code, ErrorCode::kRefused);
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_EQ(pair.b.domain->accept(1, std::span(good).first(length)).error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_EQ(pair.a.domain->complete(kLinkOfA, {}).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(pair.a.domain->complete(5, {}).error().code, ErrorCode::kInvalidArgument);
  EXPECT_FALSE(pair.a.domain->offer(kLinkOfA).ok()) << "one link twice";
}

TEST(Host, AWrongSecretCostsOnlyItsSender) {
  Pair pair;
  Bytes offer = pair.a.domain->offer(kLinkOfA).value();
  offer[offsetof(Invitation, secret) + 15] ^= std::byte{1};
  const Bytes answer = pair.b.domain->accept(kLinkOfB, offer).value();
  post(pair.b, kLinkOfB, pair.a.rkey, {.work = 1});
  EXPECT_EQ(pair.a.domain->complete(kLinkOfA, answer).error().code, ErrorCode::kPeerDown);
  run_until(pair.both(), [&] { return !pair.b.sink.down.empty(); }, "the refusal");
  EXPECT_EQ(pair.b.sink.failure(1), ErrorCode::kPeerDown);
  offer[offsetof(Invitation, secret) + 15] ^= std::byte{1};
  ASSERT_TRUE(pair.a.domain->complete(kLinkOfA, pair.b.domain->accept(kLinkOfB + 1, offer).value()).ok());
  EXPECT_FALSE(pair.b.domain->accept(kLinkOfB + 1, offer).ok()) << "one link twice";
  // A secret is good once: a third party that has read the offer comes too late.
  ASSERT_TRUE(pair.b.domain->accept(kLinkOfB + 2, offer).ok());
  run_until(pair.both(), [&] { return pair.b.sink.down.size() == 2; }, "the second refusal");
  post(pair.b, kLinkOfB + 1, pair.a.rkey, {.work = 2});
  run_until(pair.both(), [&] { return pair.a.sink.counted == 1; }, "the good link");
}

TEST(Host, EveryBitOfAnOfferMayBeWrong) {
  End acceptor;
  for (size_t byte = 0; byte < sizeof(Offer); ++byte) {
    End offerer;
    Bytes offer = offerer.domain->offer(kLinkOfA).value();
    offer[byte] ^= std::byte{0x81};
    const auto link = static_cast<LinkId>(byte + 1);
    if (acceptor.domain->accept(link, offer).ok()) {
      run_idle({offerer.domain.get(), acceptor.domain.get()});
      EXPECT_TRUE(acceptor.domain->fence(link));
    }
    EXPECT_TRUE(offerer.domain->fence(kLinkOfA));
  }
}

class HostScribbles : public testing::TestWithParam<int> {};

TEST_P(HostScribbles, OverwrittenControlWordsCostTheLinkOnly) {
  Pair pair(Backing::kMemfd);
  pair.connect();
  Segment& segment = only_segment();
  for (Channel* channel : {&segment.to_acceptor, &segment.to_offerer}) {
    switch (GetParam()) {
      case 0:
        channel->tail.store(1ULL << 63);
        break;
      case 1:
        channel->head.store(77);
        break;
      case 2:
        channel->starved.store(1);
        break;
      case 3:
        channel->revoked.store(~0ULL);
        break;
      case 4:
        channel->messages_put.store(~0ULL);
        break;
      case 5:
        channel->messages_taken.store(~0ULL);
        break;
      default:
        std::memset(static_cast<void*>(channel), 0xA5, sizeof(*channel));
    }
  }
  for (WorkId work = 0; work < kRingEntries + 10; ++work) {
    post(pair.a, kLinkOfA, pair.b.rkey, {.work = work, .page_bytes = 8});
    if (work % 64 == 0) run_idle(pair.both());
  }
  run_idle(pair.both());
  EXPECT_FALSE(pair.a.sink.completed.empty());
  const bool harmless = GetParam() == 1 || GetParam() == 2 || GetParam() == 5;  // their owner writes them again
  EXPECT_EQ(pair.a.sink.down.empty() && pair.b.sink.down.empty(), harmless);
  if (harmless) {
    EXPECT_EQ(pair.b.sink.counted, kRingEntries + 10);
  }
}

INSTANTIATE_TEST_SUITE_P(Words, HostScribbles, testing::Range(0, 7));

TEST(Host, AHeadBeyondTheTailIsNoRoom) {
  Pair pair;
  pair.connect();
  for (WorkId work = 0; work < kRingEntries; ++work)
    post(pair.a, kLinkOfA, pair.b.rkey, {.work = work, .page_bytes = 8});
  only_segment().to_acceptor.head.store(kRingEntries + 1);
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = kRingEntries, .page_bytes = 8});
  EXPECT_EQ(pair.a.sink.failure(kRingEntries), ErrorCode::kPeerDown);
  EXPECT_EQ(pair.a.sink.down.size(), 1U);
}

// A peer made of bare system calls: it accepts A's offer as it likes.
struct RawPeer {
  explicit RawPeer(End& end) {
    const Bytes bytes = end.domain->offer(kLinkOfA).value();
    std::memcpy(&offer, bytes.data(), sizeof(offer));
    socket = std::move(connect_to(offer.socket.data()).value());
    segment = std::move(create_sealed_memory("kvc-link", sizeof(Segment), Others::kWrite).value());
    board = std::move(create_sealed_memory("kvc-board", sizeof(Board), Others::kRead).value());
  }
  void hello() const {
    const std::array fds{segment.fd.get(), board.fd.get()};
    ASSERT_EQ(send_message(socket.get(), {MessageKind::kHello, 0, 0, offer.secret}, fds), Sent::kYes);
  }
  // The domain hangs up on us, sooner or later.
  void expect_hangup(End& end) const {
    run_until(
        {end.domain.get()},
        [this] {
          Message message;
          std::array<UniqueFd, kMaxDescriptors> fds;
          return receive_message(socket.get(), message, fds) == Received::kClosed;
        },
        "the hang-up");
  }
  Offer offer;
  UniqueFd socket;
  SealedMemory segment;
  SealedMemory board;
};

TEST(Host, StrangersWithoutTheRightWordsAreDropped) {
  End end;
  const std::vector<std::function<void(const RawPeer&)>> openings = {
      [](const RawPeer& raw) { EXPECT_EQ(send(raw.socket.get(), "hi", 2, 0), 2); },
      [](const RawPeer& raw) { EXPECT_EQ(send_message(raw.socket.get(), {MessageKind::kWake}, {}), Sent::kYes); },
      [](const RawPeer& raw) {  // no descriptors
        EXPECT_EQ(send_message(raw.socket.get(), {MessageKind::kHello, 0, 0, raw.offer.secret}, {}), Sent::kYes);
      },
      [](const RawPeer& raw) {  // memory that is too small
        const SealedMemory small = std::move(create_sealed_memory("kvc-link", 4096, Others::kWrite).value());
        const std::array fds{small.fd.get(), raw.board.fd.get()};
        EXPECT_EQ(send_message(raw.socket.get(), {MessageKind::kHello, 0, 0, raw.offer.secret}, fds), Sent::kYes);
      },
      [](const RawPeer& raw) {  // memory that may shrink under us
        const UniqueFd open(memfd_create("kvc-link", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        EXPECT_EQ(ftruncate(open.get(), sizeof(Segment)), 0);
        const std::array fds{open.get(), raw.board.fd.get()};
        EXPECT_EQ(send_message(raw.socket.get(), {MessageKind::kHello, 0, 0, raw.offer.secret}, fds), Sent::kYes);
      },
  };
  for (const auto& opening : openings) {
    const RawPeer raw(end);
    run_idle({end.domain.get()});  // it has been let in, and is silent
    opening(raw);
    raw.expect_hangup(end);
    EXPECT_TRUE(end.domain->fence(kLinkOfA));
    run_idle({end.domain.get()});
  }
  EXPECT_TRUE(end.sink.down.empty()) << "none of them ever had a link";
}

TEST(Host, AHelloThatComesAfterTheConnectionIsHeardByComplete) {
  End end;
  const RawPeer raw(end);
  run_idle({end.domain.get()});  // the worker was quicker than the peer: a connection, and no word on it
  raw.hello();
  const Answer answer;
  const auto* bytes = reinterpret_cast<const std::byte*>(&answer);
  const Status completed = end.domain->complete(kLinkOfA, {bytes, sizeof(answer)});
  EXPECT_TRUE(completed.ok());
}

TEST(Host, SilentStrangersDoNotKeepPeersOut) {
  Pair pair;
  std::vector<std::unique_ptr<RawPeer>> silent;
  for (int i = 0; i < 200; ++i) {
    silent.push_back(std::make_unique<RawPeer>(pair.a));
    run_idle(pair.both());
    pair.a.domain->fence(kLinkOfA);
    run_idle(pair.both());
  }
  pair.connect();
  post(pair.b, kLinkOfB, pair.a.rkey, {.work = 1});
  run_until(pair.both(), [&] { return pair.a.sink.counted == 1; }, "a write");
}

TEST(Host, ALyingPeerCostsItsLinkOnly) {
  End end;
  const std::vector<std::function<void(const RawPeer&)>> lies = {
      [](const RawPeer& raw) { EXPECT_EQ(send(raw.socket.get(), "hi", 2, 0), 2); },
      [](const RawPeer& raw) { EXPECT_EQ(send_message(raw.socket.get(), {MessageKind::kWelcome}, {}), Sent::kYes); },
      [](const RawPeer& raw) {
        EXPECT_EQ(send_message(raw.socket.get(), {MessageKind::kMemory, 1, 1}, {}), Sent::kYes);
      },
      [](const RawPeer& raw) {
        EXPECT_EQ(send_message(raw.socket.get(), {static_cast<MessageKind>(99)}, {}), Sent::kYes);
      },
  };
  for (const auto& lie : lies) {
    const RawPeer raw(end);
    raw.hello();
    const size_t before = end.sink.down.size();
    run_idle({end.domain.get()});
    lie(raw);
    run_until({end.domain.get()}, [&] { return end.sink.down.size() > before; }, "the end of the link");
    EXPECT_TRUE(end.domain->fence(kLinkOfA));
    run_idle({end.domain.get()});
  }
}

TEST(Host, ALyingBoardIsCheckedBeforeAnythingIsWritten) {
  End end;
  const RawPeer raw(end);
  raw.hello();
  run_idle({end.domain.get()});
  const SealedMemory memory = std::move(create_sealed_memory("host-test", 8192, Others::kWrite).value());
  const std::array fds{memory.fd.get()};
  ASSERT_EQ(send_message(raw.socket.get(), {MessageKind::kMemory, 1, 8192}, fds), Sent::kYes);
  run_idle({end.domain.get()});
  RegionEntry& entry = reinterpret_cast<Board*>(raw.board.mapping.data())->regions[5];
  const uint64_t rkey = 7 * kMaxRegions + 5;
  entry.rkey.store(rkey);
  entry.memory.store(1);
  const auto outcome = [&](WorkId work, uint64_t length, uint64_t offset, uint64_t to) {
    entry.length.store(length);
    entry.memory_offset.store(offset);
    post(end, kLinkOfA, rkey, {.work = work, .pages = {{0, to}}});
    return end.sink.failure(work);
  };
  EXPECT_EQ(outcome(1, 1ULL << 40, 0, 1ULL << 39), ErrorCode::kOutOfRange);
  EXPECT_EQ(outcome(2, 8192, 1, 0), ErrorCode::kOutOfRange);
  EXPECT_EQ(outcome(3, 8192, UINT64_MAX - 100, 0), ErrorCode::kOutOfRange);
  EXPECT_EQ(outcome(4, UINT64_MAX, UINT64_MAX, 4096), ErrorCode::kOutOfRange);
  EXPECT_EQ(outcome(5, 4096, 4096, 0), std::nullopt);
  EXPECT_TRUE(end.sink.succeeded(5));
  // A region in memory that never arrives: the batch waits, the worker sleeps, the fence ends it.
  entry.memory.store(2);
  EXPECT_EQ(outcome(6, 4096, 0, 0), std::nullopt);
  EXPECT_TRUE(end.domain->prepare_sleep());
  EXPECT_TRUE(end.domain->fence(kLinkOfA));
  EXPECT_EQ(end.sink.failure(6), ErrorCode::kPeerDown);
}

}  // namespace
}  // namespace kvc::host
