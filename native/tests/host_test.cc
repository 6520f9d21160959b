// The host provider between two domains of one process: data, counting, back-pressure, memory, fences.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <filesystem>

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
  const std::vector<int64_t> from = test::shuffled(shape.pages, pair.a.bytes / stride, 3);
  const std::vector<int64_t> to = test::shuffled(shape.pages, pair.a.bytes / stride, 4);
  TestBatch batch{.page_bytes = shape.page_bytes, .pages = {}};
  std::vector<std::byte> expected = pair.b.contents();
  for (size_t i = 0; i < shape.pages; ++i) {
    const uint64_t read = static_cast<uint64_t>(from[i]) * stride;
    const uint64_t written = static_cast<uint64_t>(to[i]) * stride;
    batch.pages.emplace_back(read, written);
    std::memcpy(expected.data() + written, pair.a.memory + read, shape.page_bytes);
  }
  pair.b.domain->on_completion = [&](const Completion& completion) {
    ASSERT_EQ(completion.kind, Completion::Kind::kImmediate);
    EXPECT_TRUE(test::same(pair.b.contents(), expected)) << "counted before all bytes were in place";
  };

  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b.rkey, batch), Posted::kYes);
  run_until(
      pair.both(), [&] { return pair.b.record().counted > 0 && !pair.a.record().completed.empty(); }, "the batch");
  EXPECT_TRUE(pair.a.record().succeeded(1));
  EXPECT_TRUE(test::same(pair.b.contents(), expected));
  EXPECT_EQ(pair.b.record().immediates, std::vector{(Immediate{7, 3, static_cast<uint32_t>(shape.pages)}.encode())});
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
  run_until(pair.both(), [&] { return pair.b.record().counted == 6; }, "both batches");
  EXPECT_EQ(std::memcmp(pair.b.memory + 8192, pair.a.memory, 12288), 0);
  EXPECT_EQ(std::memcmp(pair.b.memory, pair.a.memory, 4096), 0);
}

TEST(Host, BothEndsWriteAndUncountedRaisesNothing) {
  Pair pair;
  pair.connect();
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1, .counted = false});
  post(pair.b, kLinkOfB, pair.a.rkey, {.work = 2, .pages = {{0, 0}, {4096, 8192}}});
  run_until(pair.both(), [&] { return pair.a.record().succeeded(1) && pair.a.record().counted == 2; }, "both writes");
  run_idle(pair.both());
  EXPECT_TRUE(pair.b.record().succeeded(2));
  EXPECT_EQ(pair.b.record().counted, 0U);
}

TEST(Host, BatchesPostedBeforeTheLinkIsUpAreQueued) {
  Pair pair;
  const Bytes answer = pair.b.domain->accept(kLinkOfB, pair.a.domain->offer(kLinkOfA).value()).value();
  for (WorkId work = 0; work < kQueueDepth; ++work) {
    EXPECT_EQ(post(pair.b, kLinkOfB, pair.a.rkey, {.work = work}), Posted::kYes);
  }
  EXPECT_EQ(post(pair.b, kLinkOfB, pair.a.rkey, {.work = kQueueDepth}), Posted::kBusy);
  run_idle(pair.both());
  EXPECT_TRUE(pair.b.record().completed.empty());
  EXPECT_TRUE(pair.b.domain->prepare_sleep()) << "nothing to do until the offerer knows the answer";
  EXPECT_TRUE(pair.a.domain->complete(kLinkOfA, answer).ok());
  run_until(pair.both(), [&] { return pair.a.record().counted == kQueueDepth; }, "the queue");
  EXPECT_EQ(post(pair.b, kLinkOfB, pair.a.rkey, {.work = kQueueDepth}), Posted::kYes);
}

// A connection exists before its domain has it. If a write were allowed then, no fence and no withdrawal would wait for
// it.
TEST(Host, NoWriteUsesALinkThatTheDomainDoesNotHaveYet) {
  End a;
  End b;
  const Bytes offer = a.domain->offer(kLinkOfA).value();
  Connector::Accepted accepted = std::move(b.domain->connector().accept(kLinkOfB, offer).value());
  ASSERT_TRUE(a.domain->complete(kLinkOfA, accepted.answer).ok());
  const std::vector<std::byte> before = b.contents();
  a.fill(1);
  for (WorkId work = 1; work <= 2; ++work) EXPECT_EQ(post(a, kLinkOfA, b.rkey, {.work = work}), Posted::kYes);
  EXPECT_EQ(a.domain->send(kLinkOfA, 3, Bytes(100)), Posted::kYes);
  run_idle({a.domain.get(), b.domain.get()});
  EXPECT_TRUE(a.record().completed.empty());
  EXPECT_EQ(b.contents(), before);
  ASSERT_TRUE(a.domain->prepare_sleep());
  pollfd entry{a.domain->domain().fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 0), 0) << "nothing to do, and yet readable";
  b.domain->domain().attach(kLinkOfB, std::move(accepted.end));
  EXPECT_EQ(::poll(&entry, 1, 10'000), 1);
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().completed.size() == 3; }, "all of them");
  EXPECT_EQ(b.record().counted, 2U);
  EXPECT_EQ(b.record().messages.size(), 1U);
}

// A link that was made and is not used. The peer learns it from the end of the connection.
TEST(Host, ALinkThatNoDomainGetsIsDownForThePeer) {
  Pair pair;
  const Bytes offer = pair.a.domain->offer(kLinkOfA).value();
  const Bytes answer = pair.b.domain->accept(kLinkOfB, offer).value();
  post(pair.b, kLinkOfB, pair.a.rkey, {.work = 1});
  {
    const auto dropped = std::move(pair.a.domain->connector().complete(kLinkOfA, answer).value());
  }
  run_until(pair.both(), [&] { return !pair.b.record().down.empty(); }, "the end");
  EXPECT_EQ(pair.b.record().failure(1), ErrorCode::kPeerDown);
}

TEST(Host, AnIdleDomainSleepsAndAWriteWakesIt) {
  Pair pair;
  pair.connect();
  pollfd entry{pair.b.domain->domain().fd(), POLLIN, 0};
  for (WorkId work = 1; work <= 3; ++work) {
    ASSERT_TRUE(pair.b.domain->prepare_sleep());
    EXPECT_EQ(::poll(&entry, 1, 0), 0) << "nothing to do, and yet readable";
    post(pair.a, kLinkOfA, pair.b.rkey, {.work = work});
    ASSERT_TRUE(pair.a.record().succeeded(work)) << "a small write is done within post()";
    EXPECT_EQ(::poll(&entry, 1, 10000), 1);
    EXPECT_TRUE(pair.b.domain->poll());
    EXPECT_EQ(pair.b.record().counted, work);
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
  for (; pair.a.record().completed.empty() && turns < 1000; ++turns) {
    EXPECT_FALSE(turns > 0 && pair.a.domain->prepare_sleep()) << "asleep over half a page";
    pair.a.domain->poll();
  }
  EXPECT_GE(turns, (16U << 20) / kChunkBytes);
  run_idle(pair.both());
  EXPECT_EQ(pair.b.record().counted, 1U);
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
  EXPECT_EQ(pair.a.record().completed.size(), kRingEntries);
  EXPECT_EQ(posted, kRingEntries + kQueueDepth);
  pair.a.domain->poll();
  ASSERT_TRUE(pair.a.domain->prepare_sleep()) << "nothing to do until there is room";
  pollfd entry{pair.a.domain->domain().fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 0), 0);
  pair.b.domain->poll();
  EXPECT_EQ(::poll(&entry, 1, 10000), 1);
  run_until(pair.both(), [&] { return pair.b.record().immediates.size() == posted; }, "every immediate");
  EXPECT_EQ(pair.a.record().completed.size(), posted);
}

TEST(Host, EachBatchPostedForACompletion) {
  Pair pair;
  pair.connect();
  pair.a.domain->on_completion = [&](const Completion& completion) {
    if (completion.work() == 5000) return;
    EXPECT_EQ(post(pair.a, kLinkOfA, pair.b.rkey, {.work = completion.work() + 1, .page_bytes = 8}), Posted::kYes);
  };
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1, .page_bytes = 8});
  run_until(pair.both(), [&] { return pair.b.record().counted == 5000; }, "the chain");
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
    return pair.a.record().failure(batch.work);
  };
  EXPECT_EQ(fails(kLinkOfA, pair.b.rkey ^ (1ULL << 40), {.work = 1}), ErrorCode::kUnknownRegion);
  EXPECT_EQ(fails(kLinkOfA, pair.b.rkey + 1, {.work = 2}), ErrorCode::kUnknownRegion);
  EXPECT_EQ(fails(kLinkOfA, 0, {.work = 3}), ErrorCode::kUnknownRegion);
  EXPECT_EQ(fails(kLinkOfA, pair.b.rkey, {.work = 4, .pages = {{0, 0}, {0, end - 4095}}}), ErrorCode::kOutOfRange);
  EXPECT_EQ(fails(kLinkOfA, pair.b.rkey, {.work = 5, .pages = {{0, UINT64_MAX - 100}}}), ErrorCode::kOutOfRange);
  EXPECT_EQ(fails(kLinkOfA, pair.b.rkey, {.work = 6, .page_bytes = end + 1}), ErrorCode::kOutOfRange);
  EXPECT_EQ(fails(99, pair.b.rkey, {.work = 7}), ErrorCode::kPeerDown);
  EXPECT_EQ(pair.b.contents(), before);
  EXPECT_TRUE(pair.b.record().immediates.empty());
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 8, .pages = {{0, end - 4096}}});
  EXPECT_TRUE(pair.a.record().succeeded(8)) << "the link works on";
}

// --- Memory

TEST(Host, RevokedKeysAreRefusedAndPlacesAreReused) {
  Pair pair;
  pair.connect();
  EXPECT_TRUE(pair.b.domain->deregister_region(pair.b.rkey));
  EXPECT_TRUE(pair.b.domain->deregister_region(pair.b.rkey)) << "idempotent";
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1});
  EXPECT_EQ(pair.a.record().failure(1), ErrorCode::kUnknownRegion);
  const uint64_t again = pair.b.domain->register_region(pair.b.memory, pair.b.bytes, -1, 0).value();
  EXPECT_NE(again, pair.b.rkey);
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 2});
  EXPECT_EQ(pair.a.record().failure(2), ErrorCode::kUnknownRegion) << "an old key leads to a new region";
  post(pair.a, kLinkOfA, again, {.work = 3});
  EXPECT_TRUE(pair.a.record().succeeded(3));
}

TEST(Host, DeregisteringWaitsForAPeerInsideItsGate) {
  Pair pair;
  pair.connect();
  Channel& to_b = only_segment().to_acceptor;
  to_b.gate.store(1);
  EXPECT_FALSE(pair.b.domain->deregister_region(pair.b.rkey));
  EXPECT_FALSE(pair.b.domain->deregister_region(pair.b.rkey));
  to_b.gate.store(3);  // it has left the gate and entered it again: this time it has seen the revoked key
  EXPECT_TRUE(pair.b.domain->deregister_region(pair.b.rkey));
}

TEST(Host, RegionsOfOneMemfdAreMappedOnceAndForgotten) {
  Pair pair;
  pair.connect();
  auto shared = std::move(SharedMemory::create("host-test-late", 1 << 20).value());
  // Registered while the link is up. The second region is at an offset that is no multiple of a memory page.
  const uint64_t low = pair.b.domain->register_region(shared.data(), 8192, shared.fd(), 0).value();
  const uint64_t high = pair.b.domain->register_region(shared.data() + 9000, 8192, shared.fd(), 9000).value();
  pair.a.fill(4);
  post(pair.a, kLinkOfA, low, {.work = 1, .pages = {{0, 4096}}});
  post(pair.a, kLinkOfA, high, {.work = 2, .pages = {{4096, 4096}}});
  run_until(pair.both(), [&] { return pair.b.record().counted == 2; }, "both regions");
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

TEST(Host, APlaceOnTheBoardIsFreeOnceItsRegistrationHasEnded) {
  End end;
  Connector& connector = end.domain->connector();
  Domain& domain = end.domain->domain();
  const MemoryRange range{end.memory, end.bytes};
  auto first = std::move(connector.register_memory(range).value());
  const uint32_t place = place_of(first->key);
  domain.publish(*first);
  EXPECT_TRUE(domain.withdraw(*first));
  const auto second = std::move(connector.register_memory(range).value());
  EXPECT_NE(place_of(second->key), place) << "a sender may still be looking there";
  first.reset();
  EXPECT_EQ(place_of(std::move(connector.register_memory(range).value())->key), place);
}

TEST(Host, AMemfdThatIsPublishedAgainIsTheSameForTheConnectorAndNewForThePeer) {
  Pair pair;
  pair.connect();
  auto shared = std::move(SharedMemory::create("host-test-late", 8192).value());
  const MemoryRange range{shared.data(), 8192, shared.fd(), 0};
  Connector& connector = pair.b.domain->connector();
  Domain& domain = pair.b.domain->domain();
  pair.a.fill(6);
  WorkId work = 0;
  std::vector<std::unique_ptr<Registration>> kept;  // each holds the memfd until its end
  for (int round = 0; round < 3; ++round) {
    Registration& region = *kept.emplace_back(std::move(connector.register_memory(range).value()));
    domain.publish(region);
    std::memset(shared.data(), 0, 8192);
    post(pair.a, kLinkOfA, region.key, {.work = ++work});
    run_until(pair.both(), [&] { return pair.a.record().succeeded(work); }, "a write");
    EXPECT_EQ(std::memcmp(shared.data(), pair.a.memory, 4096), 0);
    EXPECT_TRUE(domain.withdraw(region));
    run_idle(pair.both());
    EXPECT_EQ(mappings_of("host-test-late").size(), 1U) << "the peer still maps it";
  }
}

// Unmapping tens of GiB takes long.
TEST(Host, WhatAPeerHadMappedIsUnmappedOnTheControlThread) {
  Pair pair;
  pair.connect();
  auto shared = std::move(SharedMemory::create("host-test-late", 8192).value());
  const uint64_t late = pair.b.domain->register_region(shared.data(), 8192, shared.fd(), 0).value();
  run_idle(pair.both());
  ASSERT_EQ(mappings_of("host-test-late").size(), 2U);
  EXPECT_TRUE(pair.b.domain->deregister_region(late));
  for (int turn = 0; turn < 40; ++turn) {
    pair.b.domain->domain().poll();
    pair.a.domain->domain().poll();
  }
  EXPECT_EQ(mappings_of("host-test-late").size(), 2U);
  run_idle(pair.both());
  EXPECT_EQ(mappings_of("host-test-late").size(), 1U);
  const size_t links = mappings_of("kvc-link").size();
  EXPECT_TRUE(pair.a.domain->domain().fence(kLinkOfA));
  EXPECT_EQ(mappings_of("kvc-link").size(), links);
  for (int turn = 0; turn < 40; ++turn) pair.b.domain->domain().poll();
  EXPECT_FALSE(pair.b.domain->domain().completions().empty()) << "the peer knows before that";
  run_idle(pair.both());
  EXPECT_EQ(mappings_of("kvc-link").size(), links - 1);
}

// The board has 16,384 entries. Only the used ones have memory behind them, whatever a link does.
TEST(Host, ABoardCostsWhatIsOnIt) {
  Pair pair;
  pair.connect();
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1});
  EXPECT_TRUE(pair.a.record().succeeded(1));
  EXPECT_TRUE(pair.a.domain->prepare_sleep());
  size_t boards = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // belongs to the iterator
    if (std::filesystem::read_symlink(entry.path(), gone).string().find("memfd:kvc-board") == std::string::npos)
      continue;
    struct stat status{};
    ASSERT_EQ(stat(entry.path().c_str(), &status), 0);
    EXPECT_GE(static_cast<size_t>(status.st_size), sizeof(Board));
    EXPECT_LT(static_cast<size_t>(status.st_blocks) * 512, sizeof(Board) / 8) << "one page has all that was used";
    ++boards;
  }
  EXPECT_EQ(boards, 2U);
}

TEST(Host, BadRegionsAreRefused) {
  End end;
  const auto refused = [&](std::byte* base, uint64_t bytes, int memfd, uint64_t offset) {
    Result<uint64_t> result = end.domain->register_region(base, bytes, memfd, offset);
    return result.ok() ? std::nullopt : std::optional(result.error().code);
  };
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
  EXPECT_EQ(pair.a.record().failure(1), ErrorCode::kPeerDown);
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA)) << "idempotent";
  EXPECT_TRUE(pair.a.record().down.empty()) << "the caller knows";
  run_until(pair.both(), [&] { return !pair.b.record().down.empty(); }, "the other end's news");
  EXPECT_EQ(pair.b.record().down[0].link, kLinkOfB);
  EXPECT_EQ(pair.b.record().down[0].error.code, ErrorCode::kPeerDown);
  post(pair.b, kLinkOfB, pair.a.rkey, {.work = 2});
  EXPECT_EQ(pair.b.record().failure(2), ErrorCode::kPeerDown);
  EXPECT_EQ(pair.b.domain->send(kLinkOfB, 3, Bytes(10)), Posted::kYes);
  EXPECT_EQ(pair.b.record().failure(3), ErrorCode::kPeerDown);
  EXPECT_TRUE(pair.b.domain->fence(kLinkOfB));
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
  // The peer does not yet know that it is fenced, and writes. The write must be refused.
  const std::vector<std::byte> before = pair.b.contents();
  pair.a.fill(9);
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1});
  EXPECT_EQ(pair.a.record().failure(1), ErrorCode::kPeerDown);
  ASSERT_EQ(pair.a.record().down.size(), 1U);
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
  EXPECT_TRUE(pair.b.domain->fence(kLinkOfB));
  run_idle(pair.both());
  EXPECT_EQ(pair.b.contents(), before);
  EXPECT_TRUE(pair.b.record().immediates.empty());
}

TEST(Host, AnOfferThatIsFencedCannotBeAccepted) {
  for (const bool before : {true, false}) {
    Pair pair;
    const Bytes offer = pair.a.domain->offer(kLinkOfA).value();
    if (before) {
      EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
    }
    ASSERT_TRUE(pair.b.domain->accept(kLinkOfB, offer).ok());
    run_idle(pair.both());
    EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
    run_until(pair.both(), [&] { return !pair.b.record().down.empty(); }, "the refusal");
    EXPECT_TRUE(pair.b.domain->fence(kLinkOfB));
    run_idle(pair.both());
    EXPECT_TRUE(mappings_of("kvc-link").empty()) << "a fenced link's memory stays";
  }
}

TEST(Host, ADomainThatEndsWithoutFencesLetsNoPeerWrite) {
  Pair pair;
  pair.connect();
  const std::vector<std::byte> before = pair.b.contents();
  pair.a.fill(9);
  pair.b.domain.reset();
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1});
  EXPECT_EQ(pair.a.record().failure(1), ErrorCode::kPeerDown);
  EXPECT_EQ(pair.b.contents(), before);
}

// A receiver that has counted a write, or has taken a message, and closes at once leaves its sender with a finished
// transfer.
TEST(Host, WhatAReceiverHasSeenBeforeItFencesIsDoneForItsSender) {
  for (const auto kind : {Completion::Kind::kImmediate, Completion::Kind::kMessage}) {
    for (int round = 0; round < 100; ++round) {
      Pair pair(Backing::kMemfd, 2 << 20);
      pair.connect();
      bool fenced = false;
      pair.b.domain->on_completion = [&](const Completion& completion) {
        if (completion.kind == kind) fenced = pair.b.domain->fence(kLinkOfB);
      };
      if (kind == Completion::Kind::kImmediate) {
        post(pair.a, kLinkOfA, pair.b.rkey, {.work = 1, .page_bytes = 2 << 20});  // more than one turn's
      } else {
        EXPECT_EQ(pair.a.domain->send(kLinkOfA, 1, Bytes(100)), Posted::kYes);
      }
      run_until(pair.both(), [&] { return fenced && !pair.a.record().down.empty(); }, "both ends");
      ASSERT_TRUE(pair.a.record().succeeded(1)) << "round " << round;
    }
  }
}

}  // namespace
}  // namespace kvc::host
