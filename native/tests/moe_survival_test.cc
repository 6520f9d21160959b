// Expert groups that survive: after the end of a rank the other ranks finish their step without it, and go on.
#include "moe/cpu_exchange.h"
#include "tests/moe_survivor.h"

namespace kvc::moe {
namespace {

constexpr uint32_t kAbsent = 1;  // the rank that is stopped or killed, where it is always the same
// A rank that others mask because of its lateness fails its test. 100 ms were too short under a sanitizer on a busy
// machine.
constexpr uint64_t kDeadline = 2'000'000'000;

class MoeSurvival : public testing::TestWithParam<std::tuple<uint32_t, bool>> {
 protected:
  static uint32_t ranks() { return std::get<0>(GetParam()); }
  static bool gpu() { return std::get<1>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Moe, MoeSurvival, testing::Combine(testing::Values(3U, 4U), testing::Bool()),
                         [](const auto& parameter) {
                           return std::to_string(std::get<0>(parameter.param)) +
                                  (std::get<1>(parameter.param) ? "Gpu" : "Host");
                         });

// KVC_TEST_MOE_DEATHS sets the number of deaths in each case.
TEST_P(MoeSurvival, AKilledRankCostsNoOtherRowAndNoLaterStep) {
  const char* text = std::getenv("KVC_TEST_MOE_DEATHS");
  const uint32_t deaths = text != nullptr ? static_cast<uint32_t>(std::atoi(text)) : 3;
  uint64_t slowest = 0;
  for (uint32_t death = 0; death < deaths && !testing::Test::HasFailure(); ++death) {
    std::mt19937 random(1000 * ranks() + death);
    const uint32_t victim = random() % ranks();
    const uint32_t last = 1 + random() % 6;  // the victim's last whole step, if it gets that far
    const uint32_t delay = random() % 3000;  // us
    run_ranks(
        ranks(), gpu(),
        [&](Rank& rank) {
          Survivor survivor(rank);
          std::optional<Fence> fence;
          if (rank.rank != victim) fence.emplace(rank, victim);
          uint64_t masked_at = 0;
          for (uint32_t number = 1; number <= last + 8 && !testing::Test::HasFailure(); ++number) {
            if (rank.rank == victim && number == last) {
              std::thread([&rank, delay] {
                std::this_thread::sleep_for(std::chrono::microseconds(delay));
                rank.parent().send(now_us());
                kill(getpid(), SIGKILL);
              }).detach();
            }
            if (rank.rank == victim && number == last + 2) pause();
            const Step step = random_step(100 * death + number, ranks());
            survivor.prepare(step);
            survivor.dispatch(step, kSend | kReceive);
            survivor.experts(step);
            const uint32_t before = survivor.masked();
            if (before != 0 && masked_at == 0) masked_at = now_us();
            survivor.combine(step, kSend | kReceive);
            survivor.check(step, before);
            if (survivor.masked() != 0 && masked_at == 0) masked_at = now_us();
          }
          EXPECT_EQ(survivor.masked(), 1U << victim);
          fence.reset();
          rank.parent().send(masked_at);
          must(rank.group->close(10'000'000'000));
        },
        [&](RankProcesses& processes) {
          const uint64_t died = processes[victim].told();
          wait_for_end(processes[victim]);
          for (uint32_t rank = 0; rank < ranks(); ++rank) {
            if (rank != victim) processes[rank].go();
          }
          for (uint32_t rank = 0; rank < ranks(); ++rank) {
            if (rank != victim) slowest = std::max(slowest, processes[rank].told() - died);
          }
        },
        {victim});
  }
  EXPECT_LT(slowest, 25'000'000U) << "us: the deadline of 30 s ended a wait, and not the report of the death";
  if (text != nullptr) std::printf("%u deaths: the last survivor went on after %.1f ms\n", deaths, slowest / 1e3);
}

// Runs the parts of a step one by one. Before each wait all present ranks have sent, so only absent ranks are waited for.
void run_in_parts(Survivor& survivor, const Step& step, const std::function<void()>& meet) {
  survivor.prepare(step);
  survivor.dispatch(step, kSend);
  survivor.masked();
  meet();
  survivor.dispatch(step, kReceive);
  survivor.experts(step);
  survivor.combine(step, kSend);
  const uint32_t before = survivor.masked();
  meet();
  survivor.combine(step, kReceive);
  survivor.check(step, before);
  meet();
}

// Waits for all present ranks, calls `meanwhile`, and lets them go on.
void meet_present(RankProcesses& processes, const std::function<void()>& meanwhile = [] {}) {
  for (uint32_t rank = 0; rank < processes.size(); ++rank) {
    if (rank != kAbsent) processes[rank].told();
  }
  meanwhile();
  for (uint32_t rank = 0; rank < processes.size(); ++rank) {
    if (rank != kAbsent) processes[rank].go();
  }
}

void continue_absent(RankProcesses& processes) {
  processes[kAbsent].go();
  ::kill(processes[kAbsent].pid, SIGCONT);
  wait_for_end(processes[kAbsent]);
}

TEST_P(MoeSurvival, AStoppedRankIsMaskedAtTheDeadlineAndEndsWhenItContinues) {
  run_ranks(
      ranks(), gpu(),
      [](Rank& rank) {
        GroupConfig config = surviving();
        config.timeout_ns = kDeadline;
        Survivor survivor(rank, config);
        const auto meet = [&rank] { rank.report(0); };
        if (rank.rank == kAbsent) {
          rank.report(0);
          const Step step = random_step(1, ranks());
          survivor.prepare(step);
          survivor.dispatch(step, kSend | kReceive);
          rank.finish();
          const auto fault = rank.group->fault();
          ASSERT_TRUE(fault.has_value());
          EXPECT_EQ(fault->first, Fault::kEvicted);
          EXPECT_NE(fault->second, kAbsent);
          return;
        }
        rank.report(0);
        run_in_parts(survivor, random_step(1, ranks()), meet);
        EXPECT_EQ(survivor.masked(), 1U << kAbsent);
        meet();  // the victim has continued, and has ended
        rank.group->fence(kAbsent);
        meet();
        run_in_parts(survivor, random_step(2, ranks()), meet);
      },
      [](RankProcesses& processes) {
        processes[kAbsent].told();
        processes[kAbsent].stop();
        for (int meeting = 0; meeting < 4; ++meeting) meet_present(processes);
        meet_present(processes, [&] { continue_absent(processes); });
        for (int meeting = 0; meeting < 4; ++meeting) meet_present(processes);
      });
}

// The stopped rank raised its flag at rank 0 alone. So rank 0 waits in combine for all others, and they still wait in
// dispatch for the stopped rank. Their own deadlines end later than those of rank 0.
TEST_P(MoeSurvival, ARankThatWaitsForTheStoppedRankIsNotMasked) {
  run_ranks(
      ranks(), gpu(),
      [](Rank& rank) {
        GroupConfig config = surviving();
        config.timeout_ns = kDeadline;
        Survivor survivor(rank, config);
        const auto meet = [&rank] { rank.report(0); };
        Step step = random_step(1, ranks());
        step.sizes[kAbsent] = 0;
        survivor.prepare(step);
        meet();
        if (rank.rank == kAbsent) {
          survivor.dispatch(step, kSend | kReceive);
          rank.finish();
          ASSERT_TRUE(rank.group->fault().has_value());
          EXPECT_EQ(rank.group->fault()->first, Fault::kEvicted);
          return;
        }
        survivor.dispatch(step, kSend);
        survivor.masked();
        const uint32_t epoch = 1;
        if (rank.rank == 0) {
          put(rank.context, rank.group->base() + Layout::arrived(kSlot) + uint64_t{kAbsent} * kFlagBytes, &epoch,
              sizeof(epoch));
        }
        meet();
        if (rank.rank != 0) std::this_thread::sleep_for(std::chrono::nanoseconds(kDeadline / 4));
        survivor.dispatch(step, kReceive);
        survivor.experts(step);
        const uint32_t before = survivor.masked();
        EXPECT_EQ(before, rank.rank == 0 ? 0U : 1U << kAbsent);
        survivor.combine(step, kSend | kReceive);
        survivor.check(step, before);
        EXPECT_EQ(survivor.masked(), 1U << kAbsent);
        meet();  // the stopped rank continues, and ends
        rank.group->fence(kAbsent);
        meet();
        run_in_parts(survivor, random_step(2, ranks()), meet);
      },
      [](RankProcesses& processes) {
        processes[kAbsent].told();
        processes[kAbsent].stop();
        meet_present(processes);
        meet_present(processes);
        meet_present(processes, [&] { continue_absent(processes); });
        for (int meeting = 0; meeting < 4; ++meeting) meet_present(processes);
      });
}

// Its deadline passes while it does not run, and the missing rank sends after that.
TEST(MoeSurvivalPauses, ARankThatWasStoppedMasksNoOther) {
  run_ranks(
      2, false,
      [](Rank& rank) {
        GroupConfig config = surviving();
        config.timeout_ns = kDeadline;
        Survivor survivor(rank, config);
        const Step step = random_step(1, 2);
        survivor.prepare(step);
        if (rank.rank == 0) rank.parent().send(0);
        if (rank.rank == 1) rank.report(0);
        survivor.dispatch(step, kSend | kReceive);
        survivor.experts(step);
        survivor.combine(step, kSend | kReceive);
        survivor.check(step, 0);
        EXPECT_EQ(survivor.masked(), 0U);
      },
      [](RankProcesses& processes) {
        for (const RankProcess& process : processes) process.told();
        std::this_thread::sleep_for(std::chrono::milliseconds(100));  // rank 0 begins to wait
        processes[0].stop();
        std::this_thread::sleep_for(std::chrono::nanoseconds(kDeadline + kDeadline / 8));
        ::kill(processes[0].pid, SIGCONT);
        processes[1].go();
      });
}

TEST_P(MoeSurvival, NoStepBeginsBeforeAMaskedRankIsFenced) {
  run_ranks(
      ranks(), gpu(),
      [](Rank& rank) {
        GroupConfig config = surviving();
        config.timeout_ns = kDeadline;
        Survivor survivor(rank, config);
        rank.report(0);
        if (rank.rank == kAbsent) return;
        const auto meet = [&rank] { rank.report(0); };
        run_in_parts(survivor, random_step(1, ranks()), meet);
        const auto area = get(rank.context, survivor.dispatch_area(), Stepper::kDispatchBytes);
        const Step step = random_step(2, ranks());
        survivor.prepare(step);
        survivor.dispatch(step, kSend);
        rank.finish();
        const auto fault = rank.group->fault();
        ASSERT_TRUE(fault.has_value());
        EXPECT_EQ(fault->first, Fault::kDispatchTimeout);
        EXPECT_EQ(fault->second, kAbsent);
        meet();
        EXPECT_EQ(get(rank.context, survivor.dispatch_area(), Stepper::kDispatchBytes), area);
      },
      [](RankProcesses& processes) {
        for (RankProcess& process : processes) process.told();
        for (uint32_t rank = 0; rank < processes.size(); ++rank) {
          if (rank != kAbsent) processes[rank].go();
        }
        for (int meeting = 0; meeting < 4; ++meeting) {
          for (uint32_t rank = 0; rank < processes.size(); ++rank) {
            if (rank != kAbsent) processes[rank].told();
          }
          if (meeting == 0) processes[kAbsent].kill();  // all have begun the step
          for (uint32_t rank = 0; rank < processes.size(); ++rank) {
            if (rank != kAbsent) processes[rank].go();
          }
        }
      },
      {kAbsent});
}

// The host writes one word after the other, so a launch can see the end of a rank beside an earlier leave.
TEST(MoeFaultNames, ARankThatEndedComesBeforeARankThatLeft) {
  Control control{};
  HostWords host{};
  alignas(128) std::array<unsigned char, Layout::flag_bytes()> segment{};
  host.left = 1U << 1;
  host.lost = 1U << 2;
  CombineLaunch launch{};
  launch.segments[0] = launch.segments[1] = launch.segments[2] = segment.data();
  launch.control = &control;
  launch.host = &host;
  launch.ranks = 3;
  launch.timeout_ns = 1;
  EXPECT_FALSE(cpu_exchange::wait_for_flags(launch, Layout::ready(0), 1, Fault::kCombineTimeout));
  EXPECT_EQ(host.fault, static_cast<uint32_t>(Fault::kLost) << 16 | 2U);
}

// The other rank goes on without this rank after it has sent its results. Its next results may come before this rank has
// read the first ones.
TEST(MoeSurvivalChecks, ARankThatIsMaskedDuringItsCombineGivesOutNoRow) {
  for (int turn = 0; turn < 200; ++turn) {
    Control control{};
    HostWords host{};
    alignas(128) std::array<std::array<unsigned char, Layout::flag_bytes()>, 2> segments{};
    alignas(16) std::array<uint16_t, 8> out{};
    const std::array<uint32_t, 1> masks = {3};
    CombineLaunch launch{};
    for (uint32_t rank : {0U, 1U}) launch.segments[rank] = segments[rank].data();
    launch.out = reinterpret_cast<unsigned char*>(out.data());
    launch.masks = masks.data();
    launch.control = &control;
    launch.host = &host;
    launch.ready = Layout::ready(0);
    launch.evicted = Layout::evicted();
    launch.waiting = Layout::waiting(0);
    launch.timeout_ns = 30'000'000'000;
    launch.ranks = 2;
    launch.tokens = launch.vectors = launch.parts = launch.survive = 1;
    launch.phases = kSend | kReceive;
    control.epoch = 1;
    std::thread combine([&launch] { cpu_exchange::combine(launch); });
    const auto waits = cpu_exchange::flag_of(launch.segments[1], launch.waiting, 0);
    while (waits.load() == 0) std::this_thread::yield();
    cpu_exchange::flag_of(launch.segments[0], launch.evicted, 1).store(1);
    cpu_exchange::flag_of(launch.segments[0], launch.ready, 1).store(1);
    combine.join();
    ASSERT_EQ(host.fault, static_cast<uint32_t>(Fault::kEvicted) << 16 | 1U) << turn;
  }
}

TEST(MoeSurvivalLimits, RowsThatSeveralBlocksWouldShareAreRefused) {
  GroupConfig config = surviving();
  auto group = must(Group::create(config));
  const std::array<uint32_t, 1> sizes = {0};
  EXPECT_TRUE(group->combine(nullptr, 0, sizes, nullptr, kMaxSurvivingHidden, false, kSend));
  const Status status = group->combine(nullptr, 0, sizes, nullptr, kMaxSurvivingHidden + 8, false, kSend);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvc::moe
