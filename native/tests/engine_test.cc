// The contract of the data plane as tests, run unchanged over each provider: two transfer engines in one process.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <thread>
#include <tuple>

#include "lane/immediate.h"
#include "tests/rig.h"

namespace kvc::test {
namespace {

class Conformance : public testing::TestWithParam<std::string> {
 protected:
  std::string provider() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Lanes, Conformance, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

// Does the work of a paged write in plain C++, on a copy of the target's bytes.
void apply(const PagedWrite& write, const std::byte* source, std::vector<std::byte>& target) {
  for (size_t i = 0; i < write.source_pages.indices.size(); ++i) {
    const uint64_t from =
        write.source_pages.offset + static_cast<uint64_t>(write.source_pages.indices[i]) * write.source_pages.stride;
    const uint64_t to =
        write.target_pages.offset + static_cast<uint64_t>(write.target_pages.indices[i]) * write.target_pages.stride;
    std::memcpy(target.data() + to, source + from, write.page_bytes);
  }
}

// --- Writes

TEST_P(Conformance, SingleWritesOfManySizesLandByteForByte) {
  constexpr size_t kBytes = (4 << 20) + 4096;
  Pair pair(provider(), kBytes);
  fill_random(pair.sender.data(), kBytes, 1);
  fill_random(pair.receiver.data(), kBytes, 2);
  std::vector<std::byte> expected(pair.receiver.data(), pair.receiver.data() + kBytes);
  uint64_t number = 0;
  for (const uint64_t bytes :
       {1, 2, 7, 63, 64, 65, 511, 4095, 4096, 4097, 65536, 99991, 1 << 20, (1 << 20) + 1, 4 << 20}) {
    const uint64_t from = (number * 13) % 4096;
    const uint64_t to = (number * 29) % 4096;
    ++number;
    const auto [set, immediate] = pair.counter(1);
    const TransferId transfer = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, from,
                                                                   pair.receiver_region, to, bytes, immediate));
    const Event reached = must(pair.receiver.engine->wait_counters(set, kLimit));
    EXPECT_EQ(reached.kind, EventKind::kCountersReached);
    std::memcpy(expected.data() + to, pair.sender.data() + from, bytes);
    ASSERT_EQ(std::memcmp(pair.receiver.data(), expected.data(), kBytes), 0) << bytes << " bytes";
    const Event done = ended(*pair.sender.engine, transfer);
    EXPECT_EQ(done.kind, EventKind::kTransferDone);
    EXPECT_EQ(done.pages, 1U);
    EXPECT_EQ(done.bytes, bytes);
    EXPECT_EQ(pair.count(set), 1U);
    must(pair.receiver.engine->release_counters(set));
  }
}

TEST_P(Conformance, PagedWritesOfManyShapesLandByteForByte) {
  struct Shape {
    uint64_t page_bytes, source_stride, target_stride, source_offset, target_offset, pages;
  };
  const std::vector<Shape> shapes = {
      {1, 1, 1, 0, 0, 300},
      {1, 3, 5, 2, 1, 64},
      {7, 8, 16, 0, 3, 65},
      {64, 64, 128, 0, 0, 63},
      {100, 333, 100, 17, 5, 129},
      {4096, 4096, 4096, 0, 0, 200},
      {4096, 8192, 4096, 4096, 0, 90},
      {16384, 16384, 32768, 0, 16384, 50},
      {65536, 65537, 65536, 1, 0, 20},
      {262144, 262144, 262144, 0, 0, 7},
      {1500000, 1500000, 1500001, 0, 0, 2},
  };
  constexpr size_t kBytes = 4 << 20;
  Pair pair(provider(), kBytes);
  fill_random(pair.sender.data(), kBytes, 3);
  fill_random(pair.receiver.data(), kBytes, 4);
  std::vector<std::byte> expected(pair.receiver.data(), pair.receiver.data() + kBytes);
  uint64_t seed = 0;
  for (const Shape& shape : shapes) {
    const auto fitting = [&](uint64_t stride, uint64_t offset) {
      return (kBytes - offset - shape.page_bytes) / stride + 1;
    };
    PagedWrite write;
    write.page_bytes = shape.page_bytes;
    write.source = pair.sender.region;
    write.target = pair.receiver_region;
    write.source_pages = {shuffled(shape.pages, fitting(shape.source_stride, shape.source_offset), ++seed),
                          shape.source_stride, shape.source_offset};
    write.target_pages = {shuffled(shape.pages, fitting(shape.target_stride, shape.target_offset), ++seed),
                          shape.target_stride, shape.target_offset};
    const auto [set, immediate] = pair.counter(shape.pages);
    write.immediate = immediate;
    apply(write, pair.sender.data(), expected);
    const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
    must(pair.sender.engine->write_pages(transfer, write));
    must(pair.sender.engine->seal(transfer));
    must(pair.receiver.engine->wait_counters(set, kLimit));
    ASSERT_EQ(std::memcmp(pair.receiver.data(), expected.data(), kBytes), 0) << shape.page_bytes;
    const Event done = ended(*pair.sender.engine, transfer);
    EXPECT_EQ(done.kind, EventKind::kTransferDone);
    EXPECT_EQ(done.pages, shape.pages);
    EXPECT_EQ(done.bytes, shape.pages * shape.page_bytes);
    EXPECT_EQ(pair.count(set), shape.pages);
  }
}

TEST_P(Conformance, BothEndsOfAConnectionCanWrite) {
  Pair pair(provider(), 8192);
  fill_random(pair.receiver.data(), 4096, 5);
  CounterSet set = must(pair.sender.engine->alloc_counters(1));
  must(pair.sender.engine->expect(set.id, {1}));
  must(pair.receiver.engine->write_one(pair.to_sender, pair.receiver.region, 0, pair.sender_region, 4096, 4096,
                                       set.immediates[0]));
  must(pair.sender.engine->wait_counters(set.id, kLimit));
  EXPECT_EQ(std::memcmp(pair.sender.data() + 4096, pair.receiver.data(), 4096), 0);
}

TEST_P(Conformance, AnUncountedWriteRaisesNothing) {
  Pair pair(provider(), 4096);
  fill_random(pair.sender.data(), 4096, 6);
  const TransferId transfer = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                 pair.receiver_region, 0, 4096, std::nullopt));
  EXPECT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferDone);
  EXPECT_EQ(std::memcmp(pair.sender.data(), pair.receiver.data(), 4096), 0);
  EXPECT_EQ(pair.receiver.engine->stats().immediates_received, 0U);
}

TEST_P(Conformance, AnEmptyPageListIsDoneAtOnce) {
  Pair pair(provider(), 4096);
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  PagedWrite write;
  write.page_bytes = 64;
  write.source = pair.sender.region;
  write.target = pair.receiver_region;
  must(pair.sender.engine->write_pages(transfer, write));
  must(pair.sender.engine->seal(transfer));
  const Event done = ended(*pair.sender.engine, transfer);
  EXPECT_EQ(done.kind, EventKind::kTransferDone);
  EXPECT_EQ(done.pages, 0U);
}

TEST_P(Conformance, SourcePagesMayBeReusedOnceTheTransferIsDone) {
  constexpr size_t kPage = 16384;
  constexpr size_t kRounds = 64;
  Pair pair(provider(), kPage * kRounds);
  for (size_t round = 0; round < kRounds; ++round) {
    fill_random(pair.sender.data(), kPage, round);  // the source page is always the same
    const TransferId transfer = must(pair.sender.engine->write_one(
        pair.to_receiver, pair.sender.region, 0, pair.receiver_region, round * kPage, kPage, std::nullopt));
    ASSERT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferDone);
  }
  std::vector<std::byte> expected(kPage);
  for (size_t round = 0; round < kRounds; ++round) {
    fill_random(expected.data(), kPage, round);
    ASSERT_EQ(std::memcmp(pair.receiver.data() + round * kPage, expected.data(), kPage), 0) << "round " << round;
  }
}

TEST_P(Conformance, MemoryWithoutAMemfdWorksToo) {
  Pair pair(provider(), 4096);
  std::vector<std::byte> source(100000);
  std::vector<std::byte> target(100000);
  fill_random(source.data(), source.size(), 8);
  const RegionId source_region = must(pair.sender.engine->register_memory(source.data(), source.size()));
  const RegionId target_region = must(pair.receiver.engine->register_memory(target.data(), target.size()));
  const RemoteRegionId imported = must(pair.sender.engine->import_region(
      pair.to_receiver, must(pair.receiver.engine->region_descriptor(target_region))));
  const auto [set, immediate] = pair.counter(1);
  must(pair.sender.engine->write_one(pair.to_receiver, source_region, 0, imported, 0, source.size(), immediate));
  must(pair.receiver.engine->wait_counters(set, kLimit));
  EXPECT_EQ(source, target);
  must(pair.sender.engine->deregister_memory(source_region, kLimit));
  must(pair.receiver.engine->deregister_memory(target_region, kLimit));
}

// --- Counting

class Domains : public testing::TestWithParam<std::tuple<std::string, std::pair<size_t, size_t>>> {};
INSTANTIATE_TEST_SUITE_P(Lanes, Domains,
                         testing::Combine(testing::ValuesIn(providers()),
                                          testing::Values(std::pair{1, 1}, std::pair{2, 2}, std::pair{4, 4},
                                                          std::pair{1, 3}, std::pair{4, 2}, std::pair{2, 3})),
                         [](const auto& info) {
                           return label(std::get<0>(info.param)) + "_" + std::to_string(std::get<1>(info.param).first) +
                                  "_to_" + std::to_string(std::get<1>(info.param).second);
                         });

TEST_P(Domains, CountsAreExactAndPagesComplete) {
  const auto& [provider, counts] = GetParam();
  constexpr size_t kPages = 1000;
  constexpr size_t kPage = 1024;
  Pair pair(provider, kPages * kPage, counts.first, counts.second);
  fill_random(pair.sender.data(), kPages * kPage, 9);
  // Three counters at once, raised by requests of different sizes, in both directions.
  CounterSet set = must(pair.receiver.engine->alloc_counters(3));
  const std::vector<uint64_t> targets = {700, 299, 1};
  must(pair.receiver.engine->expect(set.id, targets));
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  std::vector<int64_t> all = shuffled(kPages, kPages, 10);
  size_t next = 0;
  for (size_t i = 0; i < targets.size(); ++i) {
    PagedWrite write;
    write.page_bytes = kPage;
    write.source = pair.sender.region;
    write.target = pair.receiver_region;
    const auto first = all.begin() + static_cast<ptrdiff_t>(next);
    const std::vector<int64_t> indices(first, first + static_cast<ptrdiff_t>(targets[i]));
    write.source_pages = {indices, kPage, 0};
    write.target_pages = {indices, kPage, 0};
    write.immediate = set.immediates[i];
    must(pair.sender.engine->write_pages(transfer, write));
    next += targets[i];
  }
  must(pair.sender.engine->seal(transfer));
  must(pair.receiver.engine->wait_counters(set.id, kLimit));
  EXPECT_EQ(std::memcmp(pair.sender.data(), pair.receiver.data(), kPages * kPage), 0);
  EXPECT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferDone);
  EXPECT_EQ(must(pair.receiver.engine->counter_values(set.id)), targets);
  EXPECT_EQ(pair.receiver.engine->stats().immediates_received, kPages);
  EXPECT_EQ(pair.receiver.engine->stats().immediates_stale, 0U);

  const auto back = must(pair.sender.engine->alloc_counters(1));
  must(pair.sender.engine->expect(back.id, {kPages}));
  const TransferId reply = must(pair.receiver.engine->open_transfer(pair.to_sender));
  PagedWrite write;
  write.page_bytes = kPage;
  write.source = pair.receiver.region;
  write.target = pair.sender_region;
  write.source_pages = {all, kPage, 0};
  write.target_pages = {shuffled(kPages, kPages, 11), kPage, 0};
  write.immediate = back.immediates[0];
  must(pair.receiver.engine->write_pages(reply, write));
  must(pair.receiver.engine->seal(reply));
  must(pair.sender.engine->wait_counters(back.id, kLimit));
  EXPECT_EQ(ended(*pair.receiver.engine, reply).kind, EventKind::kTransferDone);
  EXPECT_EQ(must(pair.sender.engine->counter_values(back.id))[0], kPages);
}

TEST_P(Conformance, AnImmediateBeforeExpectIsNotLost) {
  Pair pair(provider(), 4096);
  CounterSet set = must(pair.receiver.engine->alloc_counters(2));
  for (const uint32_t immediate : set.immediates) {
    const TransferId transfer = must(
        pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64, immediate));
    ASSERT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferDone);
  }
  // The write is done at the sender. The receiver counts it as soon as its transfer thread runs.
  const auto values = [&] { return must(pair.receiver.engine->counter_values(set.id)); };
  while (values() != std::vector<uint64_t>{1, 1}) std::this_thread::yield();
  must(pair.receiver.engine->expect(set.id, {1, 1}));
  EXPECT_EQ(must(pair.receiver.engine->wait_counters(set.id, kLimit)).kind, EventKind::kCountersReached);
}

TEST_P(Conformance, ALateImmediateIsStaleAndNeverCreditedToTheNewOwner) {
  Pair pair(provider(), 4096);
  CounterSet old = must(pair.receiver.engine->alloc_counters(1));
  must(pair.receiver.engine->release_counters(old.id));
  // Takes every slot, so that the old slot has a new owner.
  CounterSet all = must(pair.receiver.engine->alloc_counters(1U << Immediate::kSlotBits));
  const uint32_t slot = Immediate::decode(old.immediates[0]).slot;
  size_t owner = all.immediates.size();
  for (size_t i = 0; i < all.immediates.size(); ++i) {
    if (Immediate::decode(all.immediates[i]).slot == slot) owner = i;
  }
  ASSERT_LT(owner, all.immediates.size());
  EXPECT_NE(all.immediates[owner], old.immediates[0]);
  ended(*pair.sender.engine, must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                pair.receiver_region, 0, 64, old.immediates[0])));
  ended(*pair.sender.engine, must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                pair.receiver_region, 0, 64, all.immediates[owner])));
  while (pair.receiver.engine->stats().immediates_received < 2) std::this_thread::yield();
  EXPECT_EQ(pair.receiver.engine->stats().immediates_stale, 1U);
  EXPECT_EQ(must(pair.receiver.engine->counter_values(all.id))[owner], 1U);
}

// --- Layer signals

TEST_P(Conformance, ArmedLayersArePostedWhenTheSignalPassesThem) {
  constexpr size_t kLayers = 6;
  constexpr size_t kPages = 70;
  constexpr size_t kPage = 512;
  constexpr size_t kLayerBytes = kPages * kPage;
  Pair pair(provider(), kLayers * kLayerBytes);
  fill_random(pair.sender.data(), kLayers * kLayerBytes, 12);
  CounterSet set = must(pair.receiver.engine->alloc_counters(kLayers));
  must(pair.receiver.engine->expect(set.id, std::vector<uint64_t>(kLayers, kPages)));
  const std::shared_ptr<LayerSignal> signal = pair.sender.engine->create_signal();
  signal->store(1);  // layer 0 is computed before anything is armed
  PagedWrite pages;
  pages.page_bytes = kPage;
  pages.source = pair.sender.region;
  pages.target = pair.receiver_region;
  pages.source_pages = {shuffled(kPages, kPages, 13), kPage, 0};
  pages.target_pages = {shuffled(kPages, kPages, 14), kPage, 0};
  std::vector<ArmedLayer> layers;
  for (size_t layer = 0; layer < kLayers; ++layer) {
    layers.push_back({layer + 1, layer * kLayerBytes, layer * kLayerBytes, set.immediates[layer]});
  }
  std::reverse(layers.begin(), layers.end());  // layers may be in any order
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  must(pair.sender.engine->arm(transfer, signal, pages, layers));
  must(pair.sender.engine->seal(transfer));

  const auto values = [&] { return must(pair.receiver.engine->counter_values(set.id)); };
  const auto expect_layers = [&](size_t posted) {
    std::vector<uint64_t> expected(kLayers, 0);
    std::fill_n(expected.begin(), posted, kPages);
    const auto complete = [&] {
      const std::vector<uint64_t> now = values();
      return std::equal(now.begin(), now.begin() + static_cast<ptrdiff_t>(posted), expected.begin());
    };
    while (!complete()) std::this_thread::yield();
    EXPECT_EQ(values(), expected);
    // Only those layers were even posted.
    must(pair.sender.engine->quiesce(transfer, kLimit));
    EXPECT_EQ(must(pair.sender.engine->progress(transfer)).pages_posted, posted * kPages);
  };
  expect_layers(1);
  signal->store(2);
  expect_layers(2);
  signal->store(4);  // two layers with one store
  expect_layers(4);
  signal->store(100);
  must(pair.receiver.engine->wait_counters(set.id, kLimit));
  EXPECT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferDone);
  EXPECT_EQ(values(), std::vector<uint64_t>(kLayers, kPages));
  std::vector<std::byte> expected(kLayers * kLayerBytes);
  for (size_t layer = 0; layer < kLayers; ++layer) {
    PagedWrite one = pages;
    one.source_pages.offset = one.target_pages.offset = layer * kLayerBytes;
    apply(one, pair.sender.data(), expected);
  }
  EXPECT_EQ(std::memcmp(pair.receiver.data(), expected.data(), expected.size()), 0);
}

TEST_P(Conformance, CancelledLayersAreNeverPosted) {
  Pair pair(provider(), 4096);
  const std::shared_ptr<LayerSignal> signal = pair.sender.engine->create_signal();
  CounterSet set = must(pair.receiver.engine->alloc_counters(1));
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  PagedWrite pages;
  pages.page_bytes = 64;
  pages.source = pair.sender.region;
  pages.target = pair.receiver_region;
  pages.source_pages = {{0, 1}, 64, 0};
  pages.target_pages = {{0, 1}, 64, 0};
  must(pair.sender.engine->arm(transfer, signal, pages, {{1, 0, 0, set.immediates[0]}}));
  must(pair.sender.engine->cancel(transfer));
  signal->store(1);
  const Event event = ended(*pair.sender.engine, transfer);
  EXPECT_EQ(event.kind, EventKind::kTransferCancelled);
  EXPECT_TRUE(event.quiesced);
  EXPECT_EQ(event.pages, 0U);
  // A later write on the same connection arrives, and the cancelled one has not arrived.
  const auto [marker, immediate] = pair.counter(1);
  must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64, immediate));
  must(pair.receiver.engine->wait_counters(marker, kLimit));
  EXPECT_EQ(pair.count(set.id), 0U);
}

// --- Cancel

TEST_P(Conformance, ACancelledTransferPostsNothingMoreAndDrains) {
  constexpr size_t kPage = 65536;
  constexpr size_t kPages = 1024;
  Pair pair(provider(), kPage * 16);
  CounterSet set = must(pair.receiver.engine->alloc_counters(1));
  PagedWrite write;
  write.page_bytes = kPage;
  write.source = pair.sender.region;
  write.target = pair.receiver_region;
  for (size_t i = 0; i < kPages; ++i) {
    write.source_pages.indices.push_back(static_cast<int64_t>(i % 16));
    write.target_pages.indices.push_back(static_cast<int64_t>(i % 16));
  }
  write.source_pages.stride = write.target_pages.stride = kPage;
  write.immediate = set.immediates[0];
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  for (int i = 0; i < 8; ++i) must(pair.sender.engine->write_pages(transfer, write));
  must(pair.sender.engine->cancel(transfer));
  const Result<TransferProgress> at_cancel = pair.sender.engine->progress(transfer);
  const Event event = ended(*pair.sender.engine, transfer);
  EXPECT_EQ(event.kind, EventKind::kTransferCancelled);
  EXPECT_TRUE(event.quiesced);
  EXPECT_LE(event.pages, 8 * kPages);
  // Nothing was posted after cancel() returned. (If all had drained by then, the transfer is forgotten already.)
  if (at_cancel.ok()) {
    EXPECT_EQ(at_cancel.value().pages_posted, event.pages);
  }
  // Drained: the receiver has counted the number in the event, and the count stays there.
  while (pair.count(set.id) < event.pages) std::this_thread::yield();
  EXPECT_EQ(pair.count(set.id), event.pages);
  // Its id is forgotten.
  EXPECT_EQ(pair.sender.engine->cancel(transfer).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(pair.sender.engine->stats().transfers_open, 0U);
}

// --- Fairness

TEST_P(Conformance, AHugeRequestDoesNotStarveASmallOne) {
  constexpr size_t kPage = 4096;
  constexpr size_t kPages = 50000;  // fifty times 16 batches of 64 pages
  Pair pair(provider(), kPage * 64);
  TransferEngine& engine = *pair.sender.engine;
  CounterSet set = must(pair.receiver.engine->alloc_counters(2));
  PagedWrite huge{kPage, pair.sender.region, {{}, kPage, 0}, pair.receiver_region, {{}, kPage, 0}, {}};
  for (size_t i = 0; i < kPages; ++i) {
    huge.source_pages.indices.push_back(static_cast<int64_t>(i % 64));
    huge.target_pages.indices.push_back(static_cast<int64_t>(i % 64));
  }
  const PagedWrite one{kPage, pair.sender.region, {{0}, kPage, 0}, pair.receiver_region, {{0}, kPage, 0}, {}};
  // One signal makes both ready in the same turn, the huge one first. When the small one ends, the transfer thread
  // reads how much of the huge one was posted. So only the order of posting decides, not a clock.
  const std::shared_ptr<LayerSignal> signal = engine.create_signal();
  const TransferId big = must(engine.open_transfer(pair.to_receiver));
  std::promise<uint64_t> posted;
  const TransferId small = must(engine.open_transfer(pair.to_receiver, [&](const Event& event) {
    const Result<TransferProgress> progress = engine.progress(big);
    const bool known = event.kind == EventKind::kTransferDone && progress.ok();
    posted.set_value(known ? progress.value().pages_posted : kPages);
  }));
  must(engine.arm(big, signal, huge, {{1, 0, 0, set.immediates[0]}}));
  must(engine.arm(small, signal, one, {{1, 0, 0, set.immediates[1]}}));
  must(engine.seal(big));
  must(engine.seal(small));
  must(engine.quiesce(big, kLimit));  // the transfer thread has taken all of it
  signal->store(1);
  EXPECT_LT(posted.get_future().get(), kPages / 2);
  const Event done = ended(engine, big);
  EXPECT_EQ(done.kind, EventKind::kTransferDone);
  EXPECT_EQ(done.pages, kPages);
}

// --- Idleness

TEST_P(Conformance, AnIdleConnectionLeavesBothWorkersAsleep) {
  const auto slow = [this](const std::string& name) {
    EngineConfig slow = config(name, provider());
    slow.domains.front().max_delay_us = 5000;  // sim: the receiver sleeps until the page is due, by a timer
    return slow;
  };
  Pair pair(slow("sender"), slow("receiver"), 4096);
  ended(*pair.sender.engine, must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                pair.receiver_region, 0, 64, std::nullopt)));
  const auto sleeps = [&] { return pair.sender.engine->stats().sleeps + pair.receiver.engine->stats().sleeps; };
  // No event reports that nothing happens. The test therefore waits for 300 milliseconds. A descriptor that stays
  // readable, or a spin that never ends, would cause thousands of turns in that time, or not a single sleep.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const uint64_t before = sleeps();
  EXPECT_GE(before, 2U);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  // A provider without a descriptor reports it, and is polled once a millisecond on either side.
  const bool looked_at = pair.sender.engine->domains()[0].find("no descriptor to wait on") != std::string::npos;
  EXPECT_LE(sleeps() - before, looked_at ? 610U : 10U);
}

// --- Callbacks and waiting

TEST_P(Conformance, ACallbackThatThrowsStopsNothing) {
  Pair pair(provider(), 4096);
  std::promise<void> called;
  must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64, std::nullopt,
                                     [&](const Event&) {
                                       called.set_value();
                                       throw std::runtime_error("a bad callback");
                                     }));
  called.get_future().get();
  const TransferId next = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                             pair.receiver_region, 0, 64, std::nullopt));
  EXPECT_EQ(ended(*pair.sender.engine, next).kind, EventKind::kTransferDone);
  EXPECT_EQ(pair.sender.engine->stats().callback_errors, 1U);
}

TEST_P(Conformance, ACallbackMaySubmitButNotBlock) {
  Pair pair(provider(), 4096);
  TransferEngine& engine = *pair.sender.engine;
  std::promise<Result<TransferId>> submitted;
  std::promise<ErrorCode> blocked;
  must(engine.write_one(
      pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64, std::nullopt, [&](const Event&) {
        submitted.set_value(
            engine.write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64, std::nullopt));
        blocked.set_value(engine.fence(pair.to_receiver, kLimit).error().code);
      }));
  const TransferId second = must(submitted.get_future().get());
  EXPECT_EQ(blocked.get_future().get(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(ended(engine, second).kind, EventKind::kTransferDone);
}

TEST_P(Conformance, ACounterCallbackIsCalledOnceWhetherItWasReachedBeforeOrAfter) {
  Pair pair(provider(), 4096);
  for (const bool early : {false, true}) {
    CounterSet set = must(pair.receiver.engine->alloc_counters(1));
    std::atomic<int> calls{0};
    std::promise<Event> called;
    const auto callback = [&](const Event& event) {
      if (++calls == 1) called.set_value(event);
    };
    if (!early) must(pair.receiver.engine->expect(set.id, {2}, callback));
    for (int i = 0; i < 4; ++i) {  // twice the target
      ended(*pair.sender.engine, must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                    pair.receiver_region, 0, 64, set.immediates[0])));
    }
    while (pair.count(set.id) < 4) std::this_thread::yield();
    if (early) must(pair.receiver.engine->expect(set.id, {2}, callback));
    const Event event = called.get_future().get();
    EXPECT_EQ(event.kind, EventKind::kCountersReached);
    EXPECT_EQ(event.id, set.id);
    must(pair.receiver.engine->release_counters(set.id));
    EXPECT_EQ(calls.load(), 1);
  }
}

}  // namespace
}  // namespace kvc::test
