// A counter with more than one target, under failover. Bytes that the receiver may have used are never written again.
// If it is unknown which pages the receiver has seen, the transfer fails instead.

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "tests/nics.h"
#include "tests/rig.h"

namespace kvc::test::reused_counter {
namespace {

constexpr size_t kSlot = 256;
constexpr size_t kBytes = 1 << 20;
// NIC 0 keeps working, NIC 1 fails.
constexpr uint32_t kStays = 0;
constexpr uint32_t kFails = 1;

// Two slots of the receiver that the sender writes repeatedly, under one counter.
struct Ring {
  Nics nics;
  Pair pair;
  CounterSet set;

  explicit Ring(const std::string& provider)
      : pair(nics.with(config("sender", provider, 2)), config("receiver", provider, 2), kBytes),
        set(must(receiver().alloc_counters(1))) {
    pair.make_links();
    std::memset(pair.receiver.data(), 0, 2 * kSlot);
  }
  TransferEngine& sender() { return *pair.sender.engine; }
  TransferEngine& receiver() { return *pair.receiver.engine; }
  // The bytes of a write must not change until it has ended, so each write has its own place at the sender.
  TransferId write(uint8_t value, size_t slot, uint32_t domain) {
    const size_t source = kSlot * static_cast<size_t>(writes++);
    std::memset(pair.sender.data() + source, value, kSlot);
    return must(sender().write_one(pair.to_receiver, pair.sender.region, source, pair.receiver_region, slot * kSlot,
                                   kSlot, set.immediates[0], {}, domain));
  }
  void expect(uint64_t target) { must(receiver().expect(set.id, {target})); }
  void wait() { must(receiver().wait_counters(set.id, kLimit)); }
  // The value of the write that filled the whole slot. No value: the bytes are not from one write.
  std::optional<uint8_t> slot(size_t number) {
    const std::byte* const data = pair.receiver.data() + number * kSlot;
    const bool whole = std::all_of(data, data + kSlot, [&](std::byte b) { return b == data[0]; });
    return whole ? std::optional(static_cast<uint8_t>(data[0])) : std::nullopt;
  }
  void await_posted(TransferId transfer) {
    await([&] { return must(sender().progress(transfer)).pages_posted == 1; }, "the post");
  }
  void expect_refused(TransferId transfer) {
    const Event event = ended(sender(), transfer);
    ASSERT_EQ(event.kind, EventKind::kTransferFailed);
    EXPECT_EQ(event.error->code, ErrorCode::kRefused) << event.error->to_string();
  }
  // The peer is still connected, and transfers with one target work.
  void expect_others_pass() {
    const auto [other, immediate] = pair.counter(1);
    const TransferId write = must(
        sender().write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 4 * kSlot, kSlot, immediate));
    EXPECT_EQ(ended(sender(), write).kind, EventKind::kTransferDone);
    must(receiver().wait_counters(other, kLimit));
  }

  int writes = 0;
};

class ReusedCounter : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Lanes, ReusedCounter, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

TEST_P(ReusedCounter, OldBytesDoNotReplaceNewerOnes) {
  for (const bool polls : {false, true}) {
    Ring ring(GetParam());
    std::optional<CounterReader> reader;
    const auto reached = [&](uint64_t count) {
      if (!polls) return ring.wait();
      await([&] { return reader->reached(0, count); }, "the count");
    };
    if (polls) {
      reader = must(ring.receiver().counter_reader(ring.set.id));
    } else {
      ring.expect(1);
    }
    ring.nics[kFails].withhold_acknowledgements();
    const TransferId first = ring.write('A', 0, kFails);
    reached(1);
    ASSERT_EQ(ring.slot(0), 'A');
    // The receiver has finished with the slot, and reports it to the sender.
    if (!polls) ring.expect(2);
    const TransferId second = ring.write('B', 0, kStays);
    reached(2);
    EXPECT_EQ(ended(ring.sender(), second).kind, EventKind::kTransferDone);
    ring.nics[kFails].go_silent();
    const TransferId third = ring.write('C', 1, kFails);
    ring.await_posted(third);
    ring.nics[kFails].die();
    ring.expect_refused(first);
    ring.expect_refused(third);
    EXPECT_EQ(ring.slot(0), 'B');
    EXPECT_EQ(ring.slot(1), 0);
    EXPECT_EQ(ring.pair.count(ring.set.id), 2U);
    EXPECT_EQ(ring.sender().stats().pages_rewritten, 0U);
    ring.expect_others_pass();
  }
}

// No unfinished page was counted, so the receiver has used none of them.
TEST_P(ReusedCounter, WhatWasNotCountedIsWrittenAgain) {
  Ring ring(GetParam());
  ring.expect(1);
  EXPECT_EQ(ended(ring.sender(), ring.write('A', 0, kFails)).kind, EventKind::kTransferDone);
  ring.wait();
  ring.expect(2);
  ring.nics[kFails].go_silent();
  const TransferId second = ring.write('B', 0, kFails);
  ring.await_posted(second);
  ring.nics[kFails].die();
  EXPECT_EQ(ended(ring.sender(), second).kind, EventKind::kTransferDone);
  ring.wait();
  EXPECT_EQ(ring.slot(0), 'B');
  EXPECT_EQ(ring.sender().stats().pages_rewritten, 1U);
}

// The loop of docs/engine.md, "Again and again", with a slot on each NIC in each step. The failing NIC loses the
// acknowledgements of `unacknowledged` steps, and then a write. Steps end, or a transfer fails, but no target is
// reached early.
TEST_P(ReusedCounter, NoReachedTargetHasOlderBytes) {
  for (const uint8_t unacknowledged : {0, 1, 2, 7, 20}) {
    Ring ring(GetParam());
    constexpr uint8_t kBegins = 5;
    const auto silent = static_cast<uint8_t>(kBegins + unacknowledged);
    const auto last = static_cast<uint8_t>(silent + 10);
    size_t open = 0;
    size_t failed = 0;
    const auto look = [&] {
      for (const Event& event : ring.sender().poll_events(64)) {
        --open;
        if (event.kind == EventKind::kTransferDone) continue;
        ++failed;
        EXPECT_EQ(event.error->code, ErrorCode::kRefused) << event.error->to_string();
      }
    };
    uint8_t step = 1;
    for (; step < last; ++step) {
      if (step == kBegins) {
        await([&] { return look(), open == 0; }, "the steps before");
        ring.nics[kFails].withhold_acknowledgements();
      }
      if (step == silent) ring.nics[kFails].go_silent();
      ring.expect(2 * step);
      const std::array writes{ring.write(step, step % 2, kFails), ring.write(step, (step + 1) % 2, kStays)};
      open += writes.size();
      if (step == silent) {
        ring.await_posted(writes[0]);
        ring.nics[kFails].die();
      }
      bool reached = false;
      await(
          [&] {
            look();
            for (const Event& event : ring.receiver().poll_events(8)) {
              reached |= event.kind == EventKind::kCountersReached;
            }
            return reached || failed > 0;
          },
          "the step");
      if (!reached) break;
      ASSERT_EQ(ring.slot(0), step) << int{unacknowledged};
      ASSERT_EQ(ring.slot(1), step) << int{unacknowledged};
    }
    await([&] { return look(), open == 0; }, "all transfers");
    // The step before the failed one, or the part of this step that the working NIC has carried.
    for (const size_t slot : {0U, 1U}) {
      ASSERT_TRUE(ring.slot(slot).has_value());
      EXPECT_GE(*ring.slot(slot), step - 1) << int{unacknowledged};
    }
    EXPECT_EQ(failed > 0, unacknowledged > 0) << int{unacknowledged};
    ring.expect_others_pass();
  }
}

}  // namespace
}  // namespace kvc::test::reused_counter
