// Trace: the steps of an armed write, as the two transfer threads make them.
#include "engine/trace.h"

#include <algorithm>
#include <map>
#include <vector>

#include "tests/rig.h"

namespace kvc::test {
namespace {

using Kind = TraceStep::Kind;

constexpr uint64_t kPageBytes = 64;

// Two layers of 100 pages, which are two batches each, counted by one counter.
class Armed {
 public:
  explicit Armed(size_t steps) {
    must(pair_.sender.engine->start_trace(steps));
    must(pair_.receiver.engine->start_trace(steps));
    const auto [set, immediate] = pair_.counter(200);
    std::vector<int64_t> indices(100);
    for (size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<int64_t>(i);
    const std::shared_ptr<LayerSignal> signal = pair_.sender.engine->create_signal();
    const PagedWrite pages{
        kPageBytes, pair_.sender.region, {indices, kPageBytes}, pair_.receiver_region, {indices, kPageBytes}, {}};
    transfer = must(pair_.sender.engine->open_transfer(pair_.to_receiver));
    must(pair_.sender.engine->arm(transfer, signal, pages, {{7, 0, 0, immediate}, {8, kSecond, kSecond, immediate}}));
    must(pair_.sender.engine->seal(transfer));
    signal->store(7);
    signal->store(8);
    must(pair_.receiver.engine->wait_counters(set, kLimit));
    ended(*pair_.sender.engine, transfer);
    counter = immediate;
    sent = pair_.sender.engine->take_trace();
    received = pair_.receiver.engine->take_trace();
  }
  const std::byte* source() const { return pair_.sender.data(); }
  TransferEngine& sender() { return *pair_.sender.engine; }

  static constexpr uint64_t kSecond = 100 * kPageBytes;
  TransferId transfer = 0;
  uint32_t counter = 0;
  TakenTrace sent;
  TakenTrace received;

 private:
  Pair pair_{"sim", 200 * kPageBytes};
};

// The transfer thread waits for the lock under which they are taken.
TEST(Trace, StepsAreHandedOverAndNotCopied) {
  constexpr size_t kCapacity = 1000;
  Trace trace;
  trace.start(kCapacity);
  for (int round = 0; round < 2; ++round) {
    trace.note({.kind = Kind::kLanded});
    const TakenTrace taken = trace.take();
    EXPECT_EQ(taken.steps.size(), 1U);
    EXPECT_GE(taken.steps.capacity(), kCapacity) << "a copy has room for its steps alone";
  }
}

TEST(Trace, TellsWhenEachLayerWasReleasedPostedAndLanded) {
  Armed armed(1000);
  EXPECT_EQ(armed.sent.lost, 0U);
  std::map<uint64_t, TraceStep> released;  // by request
  std::map<uint64_t, uint64_t> posted;     // pages by request
  std::map<uint64_t, uint64_t> landed;
  int64_t before = 0;
  for (const TraceStep& step : armed.sent.steps) {
    EXPECT_GE(step.nanoseconds, before);
    before = step.nanoseconds;
    if (step.kind == Kind::kReleased) {
      released[step.request] = step;
      continue;
    }
    ASSERT_TRUE(released.contains(step.request));
    (step.kind == Kind::kPosted ? posted : landed)[step.request] += step.pages;
    EXPECT_LE(landed[step.request], posted[step.request]);
  }
  ASSERT_EQ(released.size(), 2U);
  for (const auto& [request, step] : released) {
    EXPECT_EQ(step.transfer, armed.transfer);
    const uint64_t offset = step.signal_value == 7 ? 0 : Armed::kSecond;
    EXPECT_EQ(step.source, reinterpret_cast<uint64_t>(armed.source() + offset));
    EXPECT_EQ(posted[request], 100U);
    EXPECT_EQ(landed[request], 100U);
  }
}

TEST(Trace, TellsWhenACounterWasRaised) {
  const Armed armed(1000);
  uint64_t pages = 0;
  for (const TraceStep& step : armed.received.steps) {
    EXPECT_EQ(step.kind, Kind::kCounted);
    EXPECT_EQ(step.request, armed.counter);
    pages += step.pages;
  }
  EXPECT_EQ(pages, 200U);
}

TEST(Trace, CountsWhatItHasNoRoomFor) {
  Armed armed(3);
  EXPECT_EQ(armed.sent.steps.size(), 3U);
  EXPECT_EQ(armed.sent.lost, 7U);  // of two layers with one release, two posts and two landings each
  EXPECT_EQ(armed.sender().take_trace().lost, 0U);
}

TEST(Trace, IsEmptyUntilItIsStarted) {
  Pair pair("sim", kPageBytes);
  const auto [set, immediate] = pair.counter(1);
  must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, kPageBytes,
                                     immediate));
  must(pair.receiver.engine->wait_counters(set, kLimit));
  const TakenTrace taken = pair.receiver.engine->take_trace();
  EXPECT_TRUE(taken.steps.empty());
  EXPECT_EQ(taken.lost, 0U);
}

}  // namespace
}  // namespace kvc::test
