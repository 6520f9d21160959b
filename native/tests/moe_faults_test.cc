// Expert groups whose ranks die or stop: the other ranks continue within the group's timeout, and name the rank.
#include "moe/cpu_exchange.h"
#include "tests/moe_test_support.h"

namespace kvc::moe {
namespace {

constexpr uint32_t kRanks = 3;
constexpr uint32_t kVictim = 1;

enum class Moment : uint8_t { kBeforeDispatch, kBetweenHalves, kBeforeCombine };

class MoeFaults : public testing::TestWithParam<std::tuple<bool, Moment>> {
 protected:
  static bool gpu() { return std::get<0>(GetParam()); }
  static Moment moment() { return std::get<1>(GetParam()); }
};
std::string name_of(const testing::TestParamInfo<std::tuple<bool, Moment>>& parameter) {
  const auto [gpu, moment] = parameter.param;
  return std::string(gpu ? "Gpu" : "Host") + (moment == Moment::kBeforeDispatch  ? "BeforeDispatch"
                                              : moment == Moment::kBetweenHalves ? "BetweenHalves"
                                                                                 : "BeforeCombine");
}
INSTANTIATE_TEST_SUITE_P(Moe, MoeFaults,
                         testing::Combine(testing::Bool(),
                                          testing::Values(Moment::kBeforeDispatch, Moment::kBetweenHalves,
                                                          Moment::kBeforeCombine)),
                         name_of);

Step step_of(uint64_t seed) {
  Step step;
  step.seed = seed;
  step.sizes.assign(kRanks, 6);
  step.owners = equal_blocks(kRanks);
  step.shapes = {{256, false}, {16, true}};
  step.hidden = 64;
  return step;
}

// Runs the step up to the moment. Returns false if the victim has reached it.
void until(Stepper& stepper, const Step& step, Moment moment) {
  stepper.prepare(step);
  if (moment == Moment::kBetweenHalves) stepper.dispatch(step, kSend);
  if (moment != Moment::kBeforeCombine) return;
  stepper.dispatch(step, kSend | kReceive);
  stepper.experts(step);
}

void expect_fault(const Rank& rank, Fault fault, uint32_t named = kVictim) {
  const auto found = rank.group->fault();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->first, fault);
  EXPECT_EQ(found->second, named);
}

// Nothing waits any more, nothing is written, and the group can be closed.
void expect_over(Rank& rank, Stepper& stepper, const Step& step) {
  const std::vector<unsigned char> before(4096, 0x77);
  put(rank.context, stepper.out(0), before.data(), before.size());
  const auto area = get(rank.context, stepper.dispatch_area(0), Stepper::kDispatchBytes);
  for (int turn = 0; turn < 3; ++turn) {
    stepper.dispatch(step, kSend | kReceive);
    stepper.combine(step, kSend | kReceive);
  }
  rank.finish();
  EXPECT_EQ(get(rank.context, stepper.out(0), before.size()), before);
  EXPECT_EQ(get(rank.context, stepper.dispatch_area(0), Stepper::kDispatchBytes), area);
  must(rank.group->close(10'000'000'000));
}

TEST_P(MoeFaults, AKilledRankIsLost) {
  run_ranks(
      kRanks, gpu(),
      [](Rank& rank) {
        Stepper stepper(rank);
        stepper.run(step_of(1));
        const Step step = step_of(2);
        until(stepper, step, moment());
        rank.finish();
        if (rank.rank == kVictim) {
          rank.report(0);
          return;
        }
        // From here on, only the victim is missing.
        if (moment() == Moment::kBeforeDispatch) stepper.dispatch(step, kSend);
        if (moment() == Moment::kBeforeCombine) stepper.combine(step, kSend);
        rank.finish();
        rank.report(0);
        moment() == Moment::kBeforeCombine ? stepper.combine(step, kReceive) : stepper.dispatch(step, kReceive);
        if (moment() == Moment::kBetweenHalves) {  // data that the victim sent before its end arrives
          stepper.experts(step);
          stepper.combine(step, kSend | kReceive);
        }
        rank.finish();
        expect_fault(rank, Fault::kLost);
        expect_over(rank, stepper, step_of(3));
        rank.report(0);
      },
      [](RankProcesses& ranks) {
        for (RankProcess& rank : ranks) rank.told();
        for (uint32_t rank : {0U, 2U}) ranks[rank].go();
        ranks[kVictim].kill();
        for (uint32_t rank : {0U, 2U}) ranks[rank].told();
        for (uint32_t rank : {0U, 2U}) ranks[rank].go();
      },
      {kVictim});
}

TEST_P(MoeFaults, AStoppedRankIsATimeout) {
  run_ranks(
      kRanks, gpu(),
      [](Rank& rank) {
        GroupConfig config = Stepper::config();
        config.timeout_ns = 150'000'000;
        Stepper stepper(rank, config);
        const Step step = step_of(2);
        const bool sends = moment() != Moment::kBeforeDispatch;  // whether the victim sends before it stops
        stepper.prepare(step);
        if (sends) {
          // In two launches, because on a loaded machine a rank may arrive later than the timeout.
          stepper.dispatch(step, kSend);
          rank.finish();
          rank.barrier();
          if (rank.rank != kVictim || moment() == Moment::kBeforeCombine) {
            stepper.dispatch(step, kReceive);
            stepper.experts(step);
          }
        }
        if (rank.rank != kVictim) {
          sends ? stepper.combine(step, kSend) : stepper.dispatch(step, kSend);
          rank.finish();
        }
        rank.report(0);
        if (rank.rank == kVictim) return;
        sends ? stepper.combine(step, kReceive) : stepper.dispatch(step, kReceive);
        rank.finish();
        expect_fault(rank, sends ? Fault::kCombineTimeout : Fault::kDispatchTimeout);
        expect_over(rank, stepper, step_of(3));
        rank.report(0);
      },
      [](RankProcesses& ranks) {
        for (RankProcess& rank : ranks) rank.told();
        ranks[kVictim].stop();
        for (uint32_t rank : {0U, 2U}) ranks[rank].go();
        for (uint32_t rank : {0U, 2U}) ranks[rank].told();
        for (uint32_t rank : {0U, 2U}) ranks[rank].go();
      },
      {kVictim});
}

class MoeRandomDeaths : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Moe, MoeRandomDeaths, testing::Bool(),
                         [](const auto& parameter) { return parameter.param ? "Gpu" : "Host"; });

// Number of random deaths for each kind of memory. A longer run sets the variable.
uint64_t deaths() {
  const char* const number = std::getenv("KVC_TEST_MOE_DEATHS");
  return number == nullptr ? 20 : std::strtoull(number, nullptr, 10);
}

// Wherever the death happens, all other ranks end and name the rank. Data that was reported as complete is right. The
// group's timeout is 30 s, and its end would have another code.
TEST_P(MoeRandomDeaths, TheOthersEnd) {
  std::mt19937 random(GetParam() ? 1 : 2);
  for (uint64_t turn = 0; turn < deaths() && !testing::Test::HasFailure(); ++turn) {
    const uint32_t victim = random() % kRanks;
    const auto moment = std::chrono::microseconds(random() % 12'000);
    run_ranks(
        kRanks, GetParam(),
        [victim](Rank& rank) {
          Stepper stepper(rank);
          rank.report(0);
          for (uint64_t seed = 1; !rank.group->fault(); ++seed) {
            Step step = step_of(seed);
            step.shapes = {{4096, false}, {64, true}};
            stepper.prepare(step);
            stepper.dispatch(step, kSend | kReceive);
            rank.finish();
            if (rank.group->fault()) break;
            stepper.experts(step);
            stepper.combine(step, kSend | kReceive);
            rank.finish();
            if (rank.group->fault()) break;
            stepper.check(step);
          }
          expect_fault(rank, Fault::kLost, victim);
          rank.report(0);
        },
        [victim, moment](RankProcesses& ranks) {
          for (RankProcess& rank : ranks) rank.told();
          for (RankProcess& rank : ranks) rank.go();
          std::this_thread::sleep_for(moment);
          ranks[victim].kill();
          for (uint32_t rank = 0; rank < kRanks; ++rank) {
            if (rank != victim) ranks[rank].told();
          }
          for (uint32_t rank = 0; rank < kRanks; ++rank) {
            if (rank != victim) ranks[rank].go();
          }
        },
        {victim});
  }
}

// The other survivors end as well, or leave in good order, before this rank waits for them.
TEST_P(MoeRandomDeaths, TheFirstDeathIsNamed) {
  run_ranks(kRanks, GetParam(), [](Rank& rank) {
    Stepper stepper(rank);
    if (rank.rank == 1) {
      rank.group->lose(0, true);
      rank.group->lose(2);
      rank.group->lose(0, true);
      rank.group->lose(0);
      const Step step = step_of(1);
      stepper.prepare(step);
      stepper.dispatch(step, kSend | kReceive);
      rank.finish();
      expect_fault(rank, Fault::kLost, 2);
    }
    rank.barrier();
  });
}

// The others have given this rank up: it ends, although no other rank has ended.
TEST_P(MoeRandomDeaths, ARankThatWasGivenUpEnds) {
  run_ranks(kRanks, GetParam(), [](Rank& rank) {
    Stepper stepper(rank);
    if (rank.rank == kVictim) {
      rank.group->lose(kVictim);
      const Step step = step_of(1);
      stepper.prepare(step);
      stepper.dispatch(step, kSend | kReceive);
      rank.finish();
      expect_fault(rank, Fault::kLost);
      expect_over(rank, stepper, step_of(2));
    }
    rank.barrier();
  });
}

// Rank 0 waits. Rank 1 is late, and shows that it waits.
class MoeWaits : public testing::Test {
 protected:
  // Returns the rank that the fault names.
  uint32_t wait(uint32_t ranks, uint64_t timeout_ns) {
    for (uint32_t rank = 0; rank < ranks; ++rank) launch_.segments[rank] = segments_[rank].data();
    launch_.control = &control_;
    launch_.host = &host_;
    launch_.waiting = Layout::waiting(0);
    launch_.ranks = ranks;
    launch_.timeout_ns = timeout_ns;
    cpu_exchange::flag_of(launch_.segments[0], Layout::ready(0), 0).store(1);
    std::atomic<bool> over = false;
    std::thread shows([&] {
      const auto end = cpu_exchange::Clock::now() + std::chrono::seconds(20);
      for (uint32_t value = 1; !over.load() && cpu_exchange::Clock::now() < end; ++value) {
        cpu_exchange::flag_of(launch_.segments[0], launch_.waiting, 1).store(value);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    EXPECT_FALSE(cpu_exchange::wait_for_flags(launch_, Layout::ready(0), 1, Fault::kCombineTimeout));
    over.store(true);
    shows.join();
    EXPECT_EQ(host_.fault >> 16, static_cast<uint32_t>(Fault::kCombineTimeout));
    return host_.fault & 0xffffU;
  }

  Control control_{};
  HostWords host_{};
  alignas(128) std::array<std::array<unsigned char, Layout::flag_bytes()>, 3> segments_{};
  CombineLaunch launch_{};
};

TEST_F(MoeWaits, ARankThatWaitsIsNotNamed) { EXPECT_EQ(wait(3, 2'000'000'000), 2U); }

TEST_F(MoeWaits, AWaitEndsAlthoughTheMissingRankWaitsForEver) {
  const auto begin = cpu_exchange::Clock::now();
  EXPECT_EQ(wait(2, 250'000'000), 1U);
  EXPECT_LT(cpu_exchange::Clock::now() - begin, std::chrono::seconds(15));
}

}  // namespace
}  // namespace kvc::moe
