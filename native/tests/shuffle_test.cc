// The shuffling decorator: that it does put things out of order, and that it keeps every other promise. What an engine
// makes of that is in engine_test.cc, which runs over it too.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/immediate.h"
#include "providers/shuffle/domain.h"
#include "tests/domain_test_support.h"
#include "tests/rig.h"

namespace kvc::shuffle {
namespace {

using test::RecordingSink;
using test::run_until;

constexpr size_t kPage = 512;
constexpr uint32_t kPages = 64;
constexpr LinkId kA = 1;
constexpr LinkId kB = 2;

struct End {
  explicit End(const std::string& device, uint64_t seed) : memory(kPage * kPages * 16) {
    DomainConfig config;
    config.provider = "shuffle";
    config.device = device;
    config.seed = seed;
    config.max_delay_us = 300;
    domain = test::must(ShuffleDomain::open(config, sink));
    rkey = test::must(domain->register_region(memory.data(), memory.size(), -1, 0));
  }
  RecordingSink sink;
  std::vector<std::byte> memory;
  std::unique_ptr<ShuffleDomain> domain;
  uint64_t rkey = 0;
};

struct Ends {
  End a{"tcp", 1};
  End b{"tcp", 2};
  Ends() {
    const Bytes offer = test::must(a.domain->offer(kA));
    const Bytes answer = test::must(b.domain->accept(kB, offer));
    test::must(a.domain->complete(kA, answer));
  }
  // Batch `number` covers the same-numbered 64 pages, on the counter of that slot.
  void post(uint32_t number) {
    std::vector<PageWrite> pages;
    for (uint32_t page = 0; page < kPages; ++page) {
      const uint64_t offset = uint64_t{number * kPages + page} * kPage;
      pages.push_back({a.memory.data() + offset, offset});
    }
    const WriteBatch batch{.work = number + 1,
                           .rkey = b.rkey,
                           .page_bytes = kPage,
                           .counted = true,
                           .immediate = Immediate{number, 0, kPages}.encode(),
                           .pages = pages};
    ASSERT_EQ(a.domain->post(kA, batch), Posted::kYes);
  }
  void run(const std::function<bool()>& done, const char* what) {
    run_until({a.domain.get(), b.domain.get()}, done, what);
  }
};

TEST(Shuffle, PagesOfAllBatchesArriveMixedEachCountedOnce) {
  Ends ends;
  test::fill_random(ends.a.memory.data(), ends.a.memory.size(), 1);
  // No page is counted before it is there: the count of a batch is complete only if all of it is equal.
  uint32_t counts[16] = {};
  ends.b.sink.on_arrival = [&](uint32_t raw) {
    const Immediate immediate = Immediate::decode(raw);
    EXPECT_EQ(immediate.multiplicity, 1U);
    if (++counts[immediate.slot] < kPages) return;
    const size_t begin = immediate.slot * kPages * kPage;
    EXPECT_EQ(std::memcmp(&ends.a.memory[begin], &ends.b.memory[begin], kPages * kPage), 0);
  };
  for (uint32_t number = 0; number < 16; ++number) ends.post(number);
  ends.run([&] { return ends.b.sink.counted == 16 * kPages && ends.a.sink.order.size() == 16; }, "everything");
  EXPECT_EQ(ends.b.memory, ends.a.memory);
  for (const uint32_t count : counts) EXPECT_EQ(count, kPages);
  EXPECT_FALSE(std::is_sorted(ends.b.sink.immediates.begin(), ends.b.sink.immediates.end()));
  EXPECT_FALSE(std::is_sorted(ends.a.sink.order.begin(), ends.a.sink.order.end()));
}

TEST(Shuffle, MessagesArriveOutOfOrderAndOnce) {
  Ends ends;
  std::vector<uint8_t> order;
  uint8_t sent = 0;
  ends.run(
      [&] {
        const std::byte message[] = {static_cast<std::byte>(sent)};
        if (sent < 40 && ends.a.domain->send(kA, 1000U + sent, message) == Posted::kYes) ++sent;
        return ends.b.sink.messages.size() == 40;
      },
      "the messages");
  for (const auto& [link, bytes] : ends.b.sink.messages) order.push_back(std::to_integer<uint8_t>(bytes[0]));
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  std::sort(order.begin(), order.end());
  for (uint8_t i = 0; i < 40; ++i) EXPECT_EQ(order[i], i);
}

TEST(Shuffle, AFenceTellsWhatHasLandedAndEndsTheRest) {
  Ends ends;
  for (uint32_t number = 0; number < 16; ++number) ends.post(number);
  ends.run([&] { return ends.b.sink.counted > 0; }, "the first page");
  bool fenced = ends.b.domain->fence(kB);
  ends.run([&] { return fenced = fenced || ends.b.domain->fence(kB); }, "the fence");
  const uint64_t counted = ends.b.sink.counted;
  ends.run([&] { return !ends.a.sink.down.empty(); }, "the sender to notice");
  EXPECT_EQ(ends.a.sink.completed.size(), 16U);
  size_t succeeded = 0;
  for (const auto& [work, error] : ends.a.sink.completed) succeeded += error ? 0 : 1;
  EXPECT_GE(counted, succeeded * kPages);  // what ended well is counted
  EXPECT_EQ(ends.a.sink.down[0].error.provider, "shuffle");
  EXPECT_EQ(ends.b.sink.counted, counted);
}

TEST(Shuffle, OneBatchBusyIsNotLost) {
  Ends ends;
  std::vector<PageWrite> pages{{ends.a.memory.data(), 0}};
  WriteBatch batch{.work = 0, .rkey = ends.b.rkey, .page_bytes = kPage, .pages = pages};
  size_t accepted = 0;
  for (WorkId work = 1; work <= 1000; ++work) {
    batch.work = work;
    if (ends.a.domain->post(kA, batch) == Posted::kYes) ++accepted;
  }
  EXPECT_LT(accepted, 1000U);
  ends.run([&] { return ends.a.sink.order.size() == accepted; }, "what was accepted");
}

TEST(Shuffle, AnUnknownProviderInsideIsRefused) {
  RecordingSink sink;
  DomainConfig config;
  config.provider = "shuffle";
  for (const char* device : {"nothing", "shuffle"}) {
    config.device = device;
    const auto domain = ShuffleDomain::open(config, sink);
    ASSERT_FALSE(domain.ok());
    EXPECT_EQ(domain.error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(domain.error().provider, "shuffle");
  }
}

}  // namespace
}  // namespace kvc::shuffle
