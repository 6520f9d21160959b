// The contract's rules about failures, run unchanged over each provider: wrong writes, revoked memory, dead peers,
// fences. Two transfer engines in one process. tests/conformance tests the same between two processes.

#include <algorithm>
#include <cstring>
#include <future>
#include <thread>

#include "tests/rig.h"

namespace kvc::test {
namespace {

class Faults : public testing::TestWithParam<std::string> {
 protected:
  std::string provider() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Lanes, Faults, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

// --- Errors as values

TEST_P(Faults, BytesOutsideARegionAreRefusedBeforeAnythingIsPosted) {
  Pair pair(provider(), 4096);
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  const auto code = [&](PagedWrite write) {
    write.source = pair.sender.region;
    write.target = pair.receiver_region;
    const Status status = pair.sender.engine->write_pages(transfer, std::move(write));
    return status.ok() ? "no error" : std::string(name(status.error().code));
  };
  EXPECT_EQ(code({1024, 0, {{4}, 1024, 0}, 0, {{0}, 1024, 0}, {}}), "OUT_OF_RANGE");
  EXPECT_EQ(code({1024, 0, {{0}, 1024, 0}, 0, {{4}, 1024, 0}, {}}), "OUT_OF_RANGE");
  EXPECT_EQ(code({1024, 0, {{0}, 1024, 0}, 0, {{-1}, 1024, 0}, {}}), "OUT_OF_RANGE");
  EXPECT_EQ(code({1024, 0, {{0}, 1024, 0}, 0, {{-1}, 0, 0}, {}}), "OUT_OF_RANGE");
  EXPECT_EQ(code({1024, 0, {{0}, 1024, 0}, 0, {{3}, 1024, 1}, {}}), "OUT_OF_RANGE");
  EXPECT_EQ(code({1024, 0, {{0}, 1024, 0}, 0, {{1}, UINT64_MAX, 0}, {}}), "OUT_OF_RANGE");
  EXPECT_EQ(code({1024, 0, {{0}, 1024, 0}, 0, {{0}, 1, UINT64_MAX}, {}}), "OUT_OF_RANGE");
  EXPECT_EQ(code({1024, 0, {{INT64_MAX}, 1024, 0}, 0, {{0}, 1, 0}, {}}), "OUT_OF_RANGE");
  EXPECT_EQ(code({UINT64_MAX, 0, {{0}, 1, 0}, 0, {{0}, 1, 0}, {}}), "OUT_OF_RANGE");
  EXPECT_EQ(code({1024, 0, {{0, 1}, 1024, 0}, 0, {{0}, 1024, 0}, {}}), "INVALID_ARGUMENT");
  EXPECT_EQ(code({0, 0, {{0}, 1024, 0}, 0, {{0}, 1024, 0}, {}}), "INVALID_ARGUMENT");
  EXPECT_EQ(code({1024, 0, {{3}, 1024, 0}, 0, {{3}, 1024, 0}, {}}), "no error");  // the last page of each side
  const auto single = [&](uint64_t from, uint64_t to, uint64_t bytes) {
    const Status status =
        pair.sender.engine->write(transfer, pair.sender.region, from, pair.receiver_region, to, bytes, std::nullopt);
    return status.ok() ? "no error" : std::string(name(status.error().code));
  };
  EXPECT_EQ(single(1, 0, 4096), "OUT_OF_RANGE");
  EXPECT_EQ(single(0, 1, 4096), "OUT_OF_RANGE");
  EXPECT_EQ(single(UINT64_MAX, 0, 2), "OUT_OF_RANGE");
  EXPECT_EQ(single(0, 0, 0), "INVALID_ARGUMENT");
  EXPECT_EQ(single(0, 0, 4096), "no error");
  must(pair.sender.engine->seal(transfer));
  const Event done = ended(*pair.sender.engine, transfer);
  EXPECT_EQ(done.kind, EventKind::kTransferDone);
  EXPECT_EQ(done.pages, 2U);
}

TEST_P(Faults, AWrongKeyFailsTheTransferAndTouchesNothing) {
  Pair pair(provider(), 4096);
  fill_random(pair.sender.data(), 4096, 20);
  Bytes descriptor = must(pair.receiver.engine->region_descriptor(pair.receiver.region));
  descriptor.back() ^= std::byte{0xFF};  // the last byte belongs to the last key
  const RemoteRegionId wrong = must(pair.sender.engine->import_region(pair.to_receiver, descriptor));
  CounterSet set = must(pair.receiver.engine->alloc_counters(1));
  const TransferId transfer =
      must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0, wrong, 0, 4096, set.immediates[0]));
  const Event event = ended(*pair.sender.engine, transfer);
  EXPECT_EQ(event.kind, EventKind::kTransferFailed);
  ASSERT_TRUE(event.error.has_value());
  EXPECT_EQ(event.error->provider, provider_of(provider()));
  EXPECT_EQ(event.error->peer, "receiver");
  EXPECT_EQ(pair.count(set.id), 0U);
  EXPECT_TRUE(
      std::all_of(pair.receiver.data(), pair.receiver.data() + 4096, [](std::byte b) { return b == std::byte{}; }));
}

TEST_P(Faults, AKeyWithAForgedLengthDoesNotReachBeyondTheRegion) {
  constexpr size_t kBytes = 8192;
  Pair pair(provider(), kBytes);
  fill_random(pair.sender.data(), kBytes, 21);
  // A region that covers only the first half, whose descriptor claims twice its length.
  const RegionId half =
      must(pair.receiver.engine->register_memory(pair.receiver.data(), kBytes / 2, pair.receiver.memory.fd(), 0));
  Bytes descriptor = must(pair.receiver.engine->region_descriptor(half));
  // The length of the region, and that of the memory that contains it.
  const auto number = [](uint64_t value) {
    return Bytes(reinterpret_cast<std::byte*>(&value), reinterpret_cast<std::byte*>(&value) + sizeof(value));
  };
  const Bytes length = number(kBytes / 2);
  const Bytes twice = number(kBytes);
  for (int i = 0; i < 2; ++i) {
    const auto found = std::search(descriptor.begin(), descriptor.end(), length.begin(), length.end());
    ASSERT_NE(found, descriptor.end());
    std::copy(twice.begin(), twice.end(), found);
  }
  const RemoteRegionId forged = must(pair.sender.engine->import_region(pair.to_receiver, descriptor));
  CounterSet set = must(pair.receiver.engine->alloc_counters(1));
  const TransferId transfer = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, kBytes / 2,
                                                                 forged, kBytes / 2, kBytes / 2, set.immediates[0]));
  EXPECT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferFailed);
  EXPECT_EQ(pair.count(set.id), 0U);
  EXPECT_TRUE(
      std::all_of(pair.receiver.data(), pair.receiver.data() + kBytes, [](std::byte b) { return b == std::byte{}; }));
}

TEST_P(Faults, ADeregisteredRegionIsNotWrittenAnyMore) {
  Pair pair(provider(), 4096);
  fill_random(pair.sender.data(), 4096, 22);
  must(pair.receiver.engine->deregister_memory(pair.receiver.region, kLimit));
  const TransferId transfer = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                 pair.receiver_region, 0, 4096, std::nullopt));
  EXPECT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferFailed);
  EXPECT_TRUE(
      std::all_of(pair.receiver.data(), pair.receiver.data() + 4096, [](std::byte b) { return b == std::byte{}; }));
  EXPECT_EQ(pair.receiver.engine->deregister_memory(pair.receiver.region, kLimit).error().code,
            ErrorCode::kUnknownRegion);
  EXPECT_EQ(pair.receiver.engine->stats().regions, 0U);
}

TEST_P(Faults, ADeregisteredSourceFailsWritesFromIt) {
  Pair pair(provider(), 4096);
  const std::shared_ptr<LayerSignal> signal = pair.sender.engine->create_signal();
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  PagedWrite pages;
  pages.page_bytes = 64;
  pages.source = pair.sender.region;
  pages.target = pair.receiver_region;
  pages.source_pages = {{0}, 64, 0};
  pages.target_pages = {{0}, 64, 0};
  must(pair.sender.engine->arm(transfer, signal, pages, {{1, 0, 0, 0}}));
  must(pair.sender.engine->deregister_memory(pair.sender.region, kLimit));
  signal->store(1);
  const Event event = ended(*pair.sender.engine, transfer);
  EXPECT_EQ(event.kind, EventKind::kTransferFailed);
  EXPECT_EQ(event.error->code, ErrorCode::kUnknownRegion);
  EXPECT_TRUE(event.quiesced);
}

// --- Peers that disappear

Event wait_peer_down(TransferEngine& engine) {
  Event event = next_event(engine);
  while (event.kind != EventKind::kPeerDown) event = next_event(engine);
  return event;
}

TEST_P(Faults, ADeadPeerFailsOnlyItsOwnTransfers) {
  Pair pair(provider(), 1 << 20);
  Side third(config("third", provider()), 1 << 20);
  const Connection other = connect(*pair.sender.engine, *third.engine);
  const RemoteRegionId third_region = must(
      pair.sender.engine->import_region(other.first_to_second, must(third.engine->region_descriptor(third.region))));
  // Armed and never signalled: the transfer is open when the peer dies.
  const std::shared_ptr<LayerSignal> signal = pair.sender.engine->create_signal();
  PagedWrite pages;
  pages.page_bytes = 64;
  pages.source = pair.sender.region;
  pages.target = pair.receiver_region;
  pages.source_pages = {{0}, 64, 0};
  pages.target_pages = {{0}, 64, 0};
  const TransferId waiting = must(pair.sender.engine->open_transfer(pair.to_receiver));
  must(pair.sender.engine->arm(waiting, signal, pages, {{1, 0, 0, 0}}));
  const TransferId untouched = must(pair.sender.engine->open_transfer(pair.to_receiver));
  pair.receiver.engine.reset();
  const Event down = wait_peer_down(*pair.sender.engine);
  EXPECT_EQ(down.id, pair.to_receiver);
  ASSERT_TRUE(down.error.has_value());
  EXPECT_EQ(down.error->peer, "receiver");
  for (const TransferId transfer : {waiting, untouched}) {
    const Event event = ended(*pair.sender.engine, transfer);
    EXPECT_EQ(event.kind, EventKind::kTransferFailed);
    EXPECT_EQ(event.error->code, ErrorCode::kPeerDown);
  }
  EXPECT_EQ(pair.sender.engine->open_transfer(pair.to_receiver).error().code, ErrorCode::kPeerDown);
  const TransferId alive = must(
      pair.sender.engine->write_one(other.first_to_second, pair.sender.region, 0, third_region, 0, 4096, std::nullopt));
  EXPECT_EQ(ended(*pair.sender.engine, alive).kind, EventKind::kTransferDone);
  must(pair.sender.engine->fence(pair.to_receiver, kLimit));
  EXPECT_EQ(pair.sender.engine->stats().peers, 1U);
  EXPECT_TRUE(pair.sender.engine->poll_events(10).empty());  // each failure was reported once
}

// Writes the sender's 16 pages to the same 16 of the receiver, repeatedly: 6 GB at 64 KiB a page, which leaves time to
// lose a peer.
PagedWrite long_write(const Pair& pair, size_t page_bytes) {
  PagedWrite write;
  write.page_bytes = page_bytes;
  write.source = pair.sender.region;
  write.target = pair.receiver_region;
  for (size_t i = 0; i < 100000; ++i) {
    write.source_pages.indices.push_back(static_cast<int64_t>(i % 16));
    write.target_pages.indices.push_back(static_cast<int64_t>(i % 16));
  }
  write.source_pages.stride = write.target_pages.stride = page_bytes;
  return write;
}

TEST_P(Faults, APeerThatDiesUnderLoadFailsTheTransferOnce) {
  constexpr size_t kPage = 65536;
  Pair pair(provider(), kPage * 16);
  const PagedWrite write = long_write(pair, kPage);
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  must(pair.sender.engine->write_pages(transfer, write));
  while (must(pair.sender.engine->progress(transfer)).pages_done < 100) std::this_thread::yield();
  pair.receiver.engine.reset();
  const Event down = next_event(*pair.sender.engine);
  EXPECT_EQ(down.kind, EventKind::kPeerDown) << "told before what fails with it";
  EXPECT_EQ(down.id, pair.to_receiver);
  const Event event = ended(*pair.sender.engine, transfer);
  EXPECT_EQ(event.kind, EventKind::kTransferFailed);
  EXPECT_EQ(event.error->code, ErrorCode::kPeerDown);
  EXPECT_GE(event.pages, 100U);
  must(pair.sender.engine->fence(pair.to_receiver, kLimit));
}

TEST_P(Faults, AfterFenceNoWriteOfThatPeerLands) {
  constexpr size_t kPage = 65536;
  Pair pair(provider(), kPage * 16);
  PagedWrite write = long_write(pair, kPage);
  fill_random(pair.sender.data(), kPage * 16, 30);
  const auto [set, immediate] = pair.counter(200);
  write.immediate = immediate;
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  must(pair.sender.engine->write_pages(transfer, write));
  must(pair.receiver.engine->wait_counters(set, kLimit));
  must(pair.receiver.engine->fence(pair.to_sender, kLimit));
  std::memset(pair.receiver.data(), 0, kPage * 16);
  // The sender goes on posting until it learns of the fence. None of its writes arrives.
  const Event event = ended(*pair.sender.engine, transfer);
  EXPECT_EQ(event.kind, EventKind::kTransferFailed);
  EXPECT_EQ(event.error->code, ErrorCode::kPeerDown);
  EXPECT_TRUE(std::all_of(pair.receiver.data(), pair.receiver.data() + kPage * 16,
                          [](std::byte b) { return b == std::byte{}; }));
  EXPECT_EQ(pair.receiver.engine->stats().peers, 0U);
  // The same two transfer engines connect again.
  const Connection again = connect(*pair.sender.engine, *pair.receiver.engine);
  const RemoteRegionId region = must(pair.sender.engine->import_region(
      again.first_to_second, must(pair.receiver.engine->region_descriptor(pair.receiver.region))));
  const TransferId one =
      must(pair.sender.engine->write_one(again.first_to_second, pair.sender.region, 0, region, 0, kPage, std::nullopt));
  EXPECT_EQ(ended(*pair.sender.engine, one).kind, EventKind::kTransferDone);
  EXPECT_EQ(std::memcmp(pair.sender.data(), pair.receiver.data(), kPage), 0);
}

TEST_P(Faults, FencingOneselfFailsTheOpenTransfers) {
  Pair pair(provider(), 4096);
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  must(pair.sender.engine->fence(pair.to_receiver, kLimit));
  const Event event = ended(*pair.sender.engine, transfer);
  EXPECT_EQ(event.kind, EventKind::kTransferFailed);
  EXPECT_EQ(event.error->code, ErrorCode::kPeerDown);
  EXPECT_TRUE(event.quiesced);  // none of its writes was posted
  EXPECT_EQ(pair.sender.engine->fence(pair.to_receiver, kLimit).error().code, ErrorCode::kUnknownPeer);
  EXPECT_EQ(pair.sender.engine->write(transfer, pair.sender.region, 0, pair.receiver_region, 0, 64, {}).error().code,
            ErrorCode::kInvalidArgument);
}

TEST_P(Faults, AnUnansweredOfferCanBeFenced) {
  Side side(config("lonely", provider()), 4096);
  const Handshake offer = must(side.engine->offer("nobody"));
  EXPECT_EQ(side.engine->open_transfer(offer.peer).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(side.engine->lane(offer.peer).error().code, ErrorCode::kInvalidArgument);
  must(side.engine->fence(offer.peer, kLimit));
  EXPECT_EQ(side.engine->stats().peers, 0U);
}

TEST_P(Faults, TwoPeersAtOnceEachGetTheirOwnPages) {
  constexpr size_t kPage = 4096;
  constexpr size_t kPages = 256;
  Pair pair(provider(), kPage * kPages);
  Side third(config("third", provider()), kPage * kPages);
  const Connection other = connect(*third.engine, *pair.receiver.engine);  // a second sender
  const RemoteRegionId imported = must(third.engine->import_region(
      other.first_to_second, must(pair.receiver.engine->region_descriptor(pair.receiver.region))));
  fill_random(pair.sender.data(), kPage * kPages, 40);
  fill_random(third.data(), kPage * kPages, 41);
  const auto [set, immediate] = pair.counter(kPages);
  const auto half = [&](size_t first) {
    std::vector<int64_t> indices;
    for (size_t i = first; i < kPages; i += 2) indices.push_back(static_cast<int64_t>(i));
    return Pages{indices, kPage, 0};
  };
  const TransferId even = must(pair.sender.engine->open_transfer(pair.to_receiver));
  must(pair.sender.engine->write_pages(even,
                                       {kPage, pair.sender.region, half(0), pair.receiver_region, half(0), immediate}));
  const TransferId odd = must(third.engine->open_transfer(other.first_to_second));
  must(third.engine->write_pages(odd, {kPage, third.region, half(1), imported, half(1), immediate}));
  must(pair.sender.engine->seal(even));
  must(third.engine->seal(odd));
  must(pair.receiver.engine->wait_counters(set, kLimit));
  for (size_t i = 0; i < kPages; ++i) {
    const std::byte* source = (i % 2 == 0 ? pair.sender.data() : third.data()) + i * kPage;
    ASSERT_EQ(std::memcmp(pair.receiver.data() + i * kPage, source, kPage), 0) << i;
  }
  EXPECT_EQ(ended(*pair.sender.engine, even).kind, EventKind::kTransferDone);
  EXPECT_EQ(ended(*third.engine, odd).kind, EventKind::kTransferDone);
}

TEST_P(Faults, ClosingAnEngineEndsItsTransfers) {
  Pair pair(provider(), 4096);
  std::promise<Event> promise;
  must(pair.sender.engine->open_transfer(pair.to_receiver, [&](const Event& event) { promise.set_value(event); }));
  pair.sender.engine.reset();
  const Event event = promise.get_future().get();
  EXPECT_EQ(event.kind, EventKind::kTransferFailed);
  EXPECT_EQ(event.error->code, ErrorCode::kClosed);
}

TEST_P(Faults, TheEngineNamesTheLane) {
  Pair pair(provider(), 4096);
  EXPECT_EQ(must(pair.sender.engine->lane(pair.to_receiver)), provider_of(provider()));
  EXPECT_EQ(must(pair.receiver.engine->lane(pair.to_sender)), provider_of(provider()));
  ASSERT_EQ(pair.sender.engine->domains().size(), 1U);
  EXPECT_EQ(pair.sender.engine->domains()[0].rfind(provider_of(provider()), 0), 0U) << pair.sender.engine->domains()[0];
}

}  // namespace
}  // namespace kvc::test
