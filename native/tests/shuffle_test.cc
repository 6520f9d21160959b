// The shuffling decorator: it changes the order of events, and keeps every other promise. engine_test.cc runs whole
// transfer engines over it.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "lane/immediate.h"
#include "providers/shuffle/provider.h"
#include "tests/domain_test_support.h"
#include "tests/rig.h"

namespace kvc::shuffle {
namespace {

using test::run_until;

constexpr size_t kPage = 512;
constexpr uint32_t kPages = 64;
constexpr LinkId kA = 1;
constexpr LinkId kB = 2;
// Long beside the time between two posts, also under a sanitizer on a loaded machine (0.5 ms was seen). A shorter delay
// is over before the next post, and then nothing changes places.
constexpr uint32_t kMaxDelayUs = 20'000;

struct End {
  explicit End(const std::string& device, uint64_t seed) : memory(kPage * kPages * 16) {
    DomainConfig config;
    config.provider = "shuffle";
    config.device = device;
    config.seed = seed;
    config.max_delay_us = kMaxDelayUs;
    domain = std::make_unique<test::Driven>([&](ControlQueue& control) { return create(config, control); });
    rkey = test::must(domain->register_region(memory.data(), memory.size()));
  }
  test::Record& record() { return domain->record; }
  std::vector<std::byte> memory;
  std::unique_ptr<test::Driven> domain;
  uint64_t rkey = 0;
};

struct Ends {
  End a{"tcp", 1};
  End b{"tcp", 2};
  Ends() { test::connect(*a.domain, *b.domain, kA, kB); }
  // Batch `number` covers the 64 pages with that number, on the counter of that slot.
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
  // No page is counted before it has arrived: when the count of a batch is complete, all its bytes must be equal.
  uint32_t counts[16] = {};
  ends.b.domain->on_completion = [&](const Completion& completion) {
    if (completion.kind != Completion::Kind::kImmediate) return;
    const Immediate immediate = Immediate::decode(completion.immediate());
    EXPECT_EQ(immediate.multiplicity, 1U);
    if (++counts[immediate.slot] < kPages) return;
    const size_t begin = immediate.slot * kPages * kPage;
    EXPECT_EQ(std::memcmp(&ends.a.memory[begin], &ends.b.memory[begin], kPages * kPage), 0);
  };
  for (uint32_t number = 0; number < 16; ++number) ends.post(number);
  ends.run([&] { return ends.b.record().counted == 16 * kPages && ends.a.record().order.size() == 16; }, "everything");
  EXPECT_EQ(ends.b.memory, ends.a.memory);
  for (const uint32_t count : counts) EXPECT_EQ(count, kPages);
  EXPECT_FALSE(std::is_sorted(ends.b.record().immediates.begin(), ends.b.record().immediates.end()));
  EXPECT_FALSE(std::is_sorted(ends.a.record().order.begin(), ends.a.record().order.end()));
}

TEST(Shuffle, MessagesArriveOutOfOrderAndOnce) {
  Ends ends;
  std::vector<uint8_t> order;
  uint8_t sent = 0;
  ends.run(
      [&] {
        // As many as the domain takes at once: only messages that wait together can change places.
        while (sent < 40) {
          const std::byte message[] = {static_cast<std::byte>(sent)};
          if (ends.a.domain->send(kA, 1000U + sent, message) != Posted::kYes) break;
          ++sent;
        }
        return ends.b.record().messages.size() == 40;
      },
      "the messages");
  for (const auto& [link, bytes] : ends.b.record().messages) order.push_back(std::to_integer<uint8_t>(bytes[0]));
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  std::sort(order.begin(), order.end());
  for (uint8_t i = 0; i < 40; ++i) EXPECT_EQ(order[i], i);
}

TEST(Shuffle, AFenceTellsWhatHasLandedAndEndsTheRest) {
  Ends ends;
  for (uint32_t number = 0; number < 16; ++number) ends.post(number);
  ends.run([&] { return ends.b.record().counted > 0; }, "the first page");
  ends.run([&] { return ends.b.domain->fence(kB); }, "the fence");
  const uint64_t counted = ends.b.record().counted;
  ends.run([&] { return !ends.a.record().down.empty(); }, "the sender to notice");
  ends.run([&] { return ends.a.domain->fence(kA); }, "the sender's fence");
  EXPECT_EQ(ends.a.record().completed.size(), 16U);
  size_t succeeded = 0;
  for (const auto& [work, error] : ends.a.record().completed) succeeded += error ? 0 : 1;
  EXPECT_GE(counted, succeeded * kPages);  // every successful page is counted
  EXPECT_EQ(ends.a.record().down[0].error.provider, "shuffle");
  EXPECT_EQ(ends.b.record().counted, counted);
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
  ends.run([&] { return ends.a.record().order.size() == accepted; }, "what was accepted");
}

TEST(Shuffle, AnUnknownProviderInsideIsRefused) {
  test::ManualControl control;
  DomainConfig config;
  config.provider = "shuffle";
  for (const char* device : {"nothing", "shuffle"}) {
    config.device = device;
    const auto domain = create(config, control);
    ASSERT_FALSE(domain.ok());
    EXPECT_EQ(domain.error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(domain.error().provider, "shuffle");
  }
}

}  // namespace
}  // namespace kvc::shuffle
