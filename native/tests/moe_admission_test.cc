// Expert groups that admit a new process in place of a rank that ended.
#include <sys/mman.h>

#include "tests/moe_survivor.h"

namespace kvc::moe {
namespace {

constexpr uint32_t kAdmissionRanks = 3;
constexpr uint32_t kAdmitted = 1;
constexpr uint32_t kNewcomers =
    2;  // processes kAdmissionRanks and kAdmissionRanks + 1, which become the victim's successors
constexpr std::array<uint32_t, 2> kSurvivors = {0, 2};

class MoeAdmission : public testing::TestWithParam<std::tuple<bool, uint32_t>> {
 protected:
  static bool gpu() { return std::get<0>(GetParam()); }
  static GroupConfig config() {
    GroupConfig config = surviving();
    config.first_epoch = std::get<1>(GetParam());
    return config;
  }
};
// The second epoch wraps around between the admissions.
INSTANTIATE_TEST_SUITE_P(Moe, MoeAdmission, testing::Combine(testing::Bool(), testing::Values(0U, 0xfffffff7U)),
                         [](const auto& parameter) {
                           return std::string(std::get<0>(parameter.param) ? "Gpu" : "Host") +
                                  (std::get<1>(parameter.param) == 0 ? "" : "AtTheWrap");
                         });

// A survivor: prepares the admission of a process. The wire to it carries epoch and descriptors.
Status prepare(Rank& rank, uint32_t process) {
  const Wire& wire = rank.peer(process);
  wire.send(must(rank.group->epochs())[kSlot], must(rank.group->descriptor()).get());
  UniqueFd segment;
  if (!wire.receive(&segment) || !segment) throw std::runtime_error("no segment of the new process");
  return rank.group->prepare_admission(kAdmitted, segment.get());
}

// The new process, until its segment is mapped at all survivors or one of them refused it.
void join(Rank& rank, GroupConfig config) {
  rank.rank = config.rank = kAdmitted;
  rank.ranks = config.ranks = kAdmissionRanks;
  config.device = rank.device;
  config.first_epoch = 0;
  rank.group = must(Group::create(config));
  for (const uint32_t survivor : kSurvivors) {
    UniqueFd segment;
    const std::optional<uint64_t> epoch = rank.peer(survivor).receive(&segment);
    if (!epoch || !segment) throw std::runtime_error("no segment of a survivor");
    std::vector<uint32_t> epochs(config.slots, 0);
    epochs[kSlot] = static_cast<uint32_t>(*epoch);
    must(rank.group->begin(epochs));
    must(rank.group->attach(survivor, segment.get()));
  }
  for (const uint32_t survivor : kSurvivors) rank.peer(survivor).send(0, must(rank.group->descriptor()).get());
}

void run_steps(Survivor& survivor, uint64_t& seed, uint32_t masked) {
  for (int step = 0; step < 4 && !testing::Test::HasFailure(); ++step) {
    survivor.run(random_step(++seed, kAdmissionRanks));
    EXPECT_EQ(survivor.masked(), masked);
  }
}

// Waits for the reports of the processes, calls `meanwhile`, and lets them go on.
void meet(RankProcesses& processes, const std::vector<uint32_t>& who, const std::function<void()>& meanwhile = [] {}) {
  for (const uint32_t process : who) processes[process].told();
  meanwhile();
  for (const uint32_t process : who) processes[process].go();
}

void end(RankProcess& process) {
  process.kill();
  wait_for_end(process);
}

TEST_P(MoeAdmission, TwoNewProcessesOneAfterTheOtherBringBackAllRows) {
  run_ranks(
      kAdmissionRanks + kNewcomers, gpu(),
      [](Rank& rank) {
        const bool original = rank.rank < kAdmissionRanks;
        const uint32_t process = rank.rank;
        rank.ranks = kAdmissionRanks;
        uint64_t seed = 0;
        if (original) {
          Survivor survivor(rank, config());
          rank.stop_watching();
          run_steps(survivor, seed, 0);
          rank.report(0);  // the test ends the victim
          for (uint32_t newcomer = kAdmissionRanks; newcomer < kAdmissionRanks + kNewcomers; ++newcomer) {
            rank.group->lose(kAdmitted);
            rank.group->fence(kAdmitted);
            run_steps(survivor, seed, 1U << kAdmitted);
            must(prepare(rank, newcomer));
            rank.report(0);  // all ranks are prepared
            EXPECT_TRUE(must(rank.group->admit()));
            run_steps(survivor, seed, 0);
            rank.report(0);  // the test ends the first new process
          }
          must(rank.group->close(10'000'000'000));
          return;
        }
        seed = 8 + uint64_t{process - kAdmissionRanks} * 8;
        join(rank, config());
        Survivor survivor(rank, *rank.group);
        rank.report(0);
        run_steps(survivor, seed, 0);
        rank.report(0);
        must(rank.group->close(10'000'000'000));
      },
      [](RankProcesses& processes) {
        meet(processes, {0, kAdmitted, 2}, [&] { end(processes[kAdmitted]); });
        meet(processes, {0, kAdmissionRanks, 2});
        meet(processes, {0, kAdmissionRanks, 2}, [&] { end(processes[kAdmissionRanks]); });
        meet(processes, {0, kAdmissionRanks + 1, 2});
        meet(processes, {0, kAdmissionRanks + 1, 2});
      },
      {kAdmitted, kAdmissionRanks});
}

// Each refusal leaves the group as it was.
TEST_P(MoeAdmission, ARefusedAdmissionChangesNothing) {
  run_ranks(
      kAdmissionRanks + 1, gpu(),
      [](Rank& rank) {
        const bool original = rank.rank < kAdmissionRanks;
        rank.ranks = kAdmissionRanks;
        uint64_t seed = 0;
        if (!original) {
          join(rank, config());
          seed = 13;
          Survivor survivor(rank, *rank.group);
          rank.report(0);
          run_steps(survivor, seed, 0);
          return;
        }
        Survivor survivor(rank, config());
        rank.stop_watching();
        Group& group = *rank.group;
        const UniqueFd own = must(group.descriptor());
        const auto refuses = [&group](uint32_t which, int descriptor, const char* words) {
          const Status status = group.prepare_admission(which, descriptor);
          ASSERT_FALSE(status) << words;
          EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().message;
          EXPECT_FALSE(group.admit()) << words;
        };
        run_steps(survivor, seed, 0);
        refuses(rank.rank, own.get(), "is no other rank");
        refuses(kAdmissionRanks, own.get(), "is no other rank");
        if (rank.rank != kAdmitted) refuses(kAdmitted, own.get(), "no launch went on without rank 1");
        rank.report(0);  // the test ends the victim
        const Step step = random_step(++seed, kAdmissionRanks);
        survivor.prepare(step);
        survivor.dispatch(step, kSend);
        rank.finish();
        group.lose(kAdmitted);  // a dispatch that begins after this waits for the end of the process
        survivor.dispatch(step, kReceive);
        survivor.experts(step);
        survivor.combine(step, kSend | kReceive);
        survivor.check(step, 1U << kAdmitted);
        refuses(kAdmitted, own.get(), "the process of rank 1 has not ended");
        group.fence(kAdmitted);
        run_steps(survivor, seed, 1U << kAdmitted);
        const UniqueFd small(memfd_create("small", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        EXPECT_FALSE(group.prepare_admission(kAdmitted, small.get()));
        EXPECT_FALSE(group.prepare_admission(kAdmitted, -1));
        EXPECT_FALSE(group.admit());
        must(group.prepare_admission(kAdmitted, own.get()));
        group.cancel_admission();
        EXPECT_FALSE(group.admit());
        run_steps(survivor, seed, 1U << kAdmitted);
        must(prepare(rank, kAdmissionRanks));
        rank.report(0);
        EXPECT_TRUE(must(group.admit()));
        run_steps(survivor, seed, 0);
      },
      [](RankProcesses& processes) {
        meet(processes, {0, kAdmitted, 2}, [&] { end(processes[kAdmitted]); });
        meet(processes, {0, kAdmissionRanks, 2});
      },
      {kAdmitted});
}

}  // namespace
}  // namespace kvc::moe
