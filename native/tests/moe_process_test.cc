// Expert groups of 2 to 4 processes, over host memory and over the driver or its stand-in. The tests check every byte
// that dispatch and combine write, and that no other byte changes.
#include "tests/moe_any_step.h"
#include "tests/moe_test_support.h"

namespace kvc::moe {
namespace {

struct Ranks {
  uint32_t ranks;
  bool gpu;
};
class MoeProcesses : public testing::TestWithParam<Ranks> {
 protected:
  static uint32_t ranks() { return GetParam().ranks; }
  static bool gpu() { return GetParam().gpu; }
};
INSTANTIATE_TEST_SUITE_P(Moe, MoeProcesses,
                         testing::Values(Ranks{2, false}, Ranks{3, false}, Ranks{4, false}, Ranks{2, true},
                                         Ranks{4, true}),
                         [](const auto& parameter) {
                           return std::to_string(parameter.param.ranks) + (parameter.param.gpu ? "Gpu" : "Host");
                         });

TEST_P(MoeProcesses, AnyStepIsWhatItsDefinitionSays) {
  run_ranks(ranks(), gpu(), [](Rank& rank) {
    Stepper stepper(rank);
    for (uint64_t seed = 1; seed <= 160 && !testing::Test::HasFailure(); ++seed) stepper.run(any_step(seed, ranks()));
    rank.barrier();
    must(rank.group->close(10'000'000'000));
  });
}

TEST_P(MoeProcesses, RowsOfAnyWidthArrive) {
  run_ranks(ranks(), gpu(), [](Rank& rank) {
    Stepper stepper(rank);
    Step step;
    step.owners = table(ranks());
    step.sizes.assign(ranks(), 0);
    // Each width for one rank's token, so that all fits. The other ranks wait for it.
    const uint32_t stride = gpu() || ranks() != 2 ? 16 * 37 : 16;
    for (uint32_t bytes = 16; bytes <= 16384 && !testing::Test::HasFailure(); bytes += stride) {
      ++step.seed;
      step.sizes.assign(ranks(), 0);
      step.sizes[step.seed % ranks()] = 1;
      step.shapes = {{bytes, false}, {bytes, true}};
      step.hidden = bytes / 2;
      stepper.run(step);
    }
    for (const uint32_t bytes : {1U, 3U, 4U, 20U, 1027U, 16380U}) {
      for (const uint32_t misaligned : {0U, 1U, 4U, 8U}) {
        ++step.seed;
        step.sizes.assign(ranks(), 1);
        step.shapes = {{bytes, false, misaligned}, {48, true, misaligned}};
        step.hidden = 8;
        stepper.run(step);
      }
    }
    rank.barrier();
  });
}

// Two micro-batches: the experts of one compute while the rows of the second are in flight.
TEST_P(MoeProcesses, TwoSlotsAreUnderWayTogether) {
  run_ranks(ranks(), gpu(), [](Rank& rank) {
    Stepper stepper(rank);
    for (uint64_t seed = 200; seed < 220 && !testing::Test::HasFailure(); ++seed) {
      std::array<Step, 2> steps = {any_step(seed, ranks()), any_step(seed + 100, ranks())};
      steps[1].owners = steps[0].owners;
      for (uint32_t slot = 0; slot < 2; ++slot) {
        steps[slot].slot = slot;
        stepper.prepare(steps[slot]);
      }
      for (const uint32_t phase : {kSend, kReceive}) {
        for (const Step& step : steps) {
          stepper.delay();
          stepper.dispatch(step, phase);
        }
      }
      for (const Step& step : steps) stepper.experts(step);
      for (const uint32_t phase : {kSend, kReceive}) {
        for (const Step& step : steps) {
          stepper.delay();
          stepper.combine(step, phase);
        }
      }
      for (const Step& step : steps) stepper.check(step);
    }
    rank.barrier();
  });
}

TEST_P(MoeProcesses, EpochsWrap) {
  run_ranks(ranks(), gpu(), [](Rank& rank) {
    for (const uint32_t first : {0xfffffff8U, 0x7ffffff8U}) {
      GroupConfig config = Stepper::config();
      config.first_epoch = first;
      Stepper stepper(rank, config);
      for (uint64_t seed = 300; seed < 324 && !testing::Test::HasFailure(); ++seed) {
        Step step = any_step(seed, ranks());
        step.slot = 0;
        stepper.run(step);
      }
      rank.barrier();
    }
  });
}

// The contents of a recorded graph: dispatch, a copy of the received rows, the experts (a copy of prepared results),
// combine.
class Recorded {
 public:
  Recorded(Rank& rank, Stepper& stepper, const Step& step)
      : rank_(rank), snapshot(rank.context, Stepper::kDispatchBytes), results(rank.context, Stepper::kCombineBytes) {
    const cuda::Driver& driver = rank.context->driver();
    const cuda::Context::Scope scope(*rank.context);
    const auto begin = test::driver_function<int(cuda::Stream, int)>("cuStreamBeginCapture_v2");
    const auto end = test::driver_function<int(cuda::Stream, void**)>("cuStreamEndCapture");
    const auto instantiate =
        test::driver_function<int(void**, void*, unsigned long long)>("cuGraphInstantiateWithFlags");
    EXPECT_EQ(begin(rank.stream(), 0), cuda::kSuccess);
    stepper.dispatch(step, kSend | kReceive);
    const auto copy = [&](unsigned char* target, const unsigned char* source, size_t bytes) {
      EXPECT_EQ(driver.cuMemcpyDtoDAsync_v2(reinterpret_cast<cuda::DevicePointer>(target),
                                            reinterpret_cast<cuda::DevicePointer>(source), bytes, rank.stream()),
                cuda::kSuccess);
    };
    copy(snapshot.data(), stepper.dispatch_area(step.slot), snapshot.bytes());
    copy(stepper.combine_area(step.slot), results.data(), results.bytes());
    stepper.combine(step, kSend | kReceive);
    void* graph = nullptr;
    EXPECT_EQ(end(rank.stream(), &graph), cuda::kSuccess);
    EXPECT_EQ(instantiate(&executable_, graph, 0), cuda::kSuccess);
    test::driver_function<int(void*)>("cuGraphDestroy")(graph);
  }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;
  ~Recorded() { test::driver_function<int(void*)>("cuGraphExecDestroy")(executable_); }
  void replay() const {
    const cuda::Context::Scope scope(*rank_.context);
    EXPECT_EQ(test::driver_function<int(void*, cuda::Stream)>("cuGraphLaunch")(executable_, rank_.stream()), 0);
    rank_.finish();
  }

 private:
  Rank& rank_;

 public:
  Place snapshot;
  Place results;

 private:
  void* executable_ = nullptr;
};

TEST(MoeGraph, ReplaysFollowTheRoutingAndTheEpoch) {
  run_ranks(3, true, [](Rank& rank) {
    Stepper stepper(rank);
    Step step = any_step(2, 3);  // 8 tokens each
    step.owners = table(3);
    step.slot = 1;
    step.accumulate = true;
    stepper.prepare(step);
    const Recorded recorded(rank, stepper, step);
    for (uint64_t seed = 400; seed < 430 && !testing::Test::HasFailure(); ++seed) {
      step.seed = seed;
      step.routing = static_cast<Routing>(seed % 4);
      if (seed % 10 == 9) {  // a launch beside the graph
        stepper.run(step);
        continue;
      }
      stepper.prepare(step);
      std::vector<unsigned char> results(Stepper::kCombineBytes, 0xEE);
      stepper.write_results(step, results);
      put(rank.context, recorded.results.data(), results.data(), results.size());
      stepper.expect_results(step.slot, results);
      stepper.delay();
      recorded.replay();
      step.dispatch(stepper.expected_area(step.slot), rank.rank);
      stepper.compare(get(rank.context, recorded.snapshot.data(), recorded.snapshot.bytes()),
                      stepper.expected_area(step.slot), "a replay", step);
      stepper.check(step);
    }
    rank.barrier();
  });
}

}  // namespace
}  // namespace kvc::moe
