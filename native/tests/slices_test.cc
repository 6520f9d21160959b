// Slices of armed lists, for checks inside the transfer engine (tests/conformance/test_slices.py has the others).
#include <gtest/gtest.h>

#include <thread>

#include "tests/rig.h"

namespace kvc::test {
namespace {

TEST(Slices, OfACancelledTransferAreNotTakenForDrained) {
  EngineConfig slow = config("sender", "sim");
  slow.domains[0].max_delay_us = 200000;  // in flight while the test requests the second one
  Pair pair(std::move(slow), config("receiver", "sim"), 4096);
  TransferEngine& engine = *pair.sender.engine;
  const TransferId transfer = must(engine.open_transfer(pair.to_receiver));
  const auto signal = engine.create_signal();
  std::vector<ArmedSlice> slices(2, {0, pair.sender.region, 0, pair.receiver_region, 0, 64, std::nullopt});
  slices[1].signal_value = 1;
  must(engine.arm_slices(transfer, signal, slices));
  while (must(engine.progress(transfer)).pages_posted == 0) std::this_thread::yield();
  must(engine.cancel(transfer));
  EXPECT_FALSE(engine.wait_drained(transfer, 1, kLimit).ok());
}

TEST(Slices, TooManyAreRefusedBeforeAnythingIsMadeOfThem) {
  Pair pair("sim", 4096);
  TransferEngine& engine = *pair.sender.engine;
  const TransferId transfer = must(engine.open_transfer(pair.to_receiver));
  const auto signal = engine.create_signal();
  const ArmedSlice good{1, pair.sender.region, 0, pair.receiver_region, 0, 64, std::nullopt};
  ArmedSlice bad = good;
  bad.source = 12345;  // any code that looks at one finds this
  const auto code = [&](size_t count, const ArmedSlice& slice) {
    return engine.arm_slices(transfer, signal, std::vector<ArmedSlice>(count, slice)).error().code;
  };
  EXPECT_EQ(code(TransferEngine::kMaxArmedSlices + 1, bad), ErrorCode::kResources);
  // Refused slices take no room.
  EXPECT_EQ(code(TransferEngine::kMaxArmedSlices, bad), ErrorCode::kUnknownRegion);
  must(engine.arm_slices(transfer, signal, std::vector<ArmedSlice>(TransferEngine::kMaxArmedSlices, good)));
  EXPECT_EQ(code(1, good), ErrorCode::kResources);
  must(engine.cancel(transfer));
}

}  // namespace
}  // namespace kvc::test
