// Groups that survive, for tests: random steps, a rank that checks them, and reports of an end.
#pragma once

#include <sys/wait.h>

#include <map>
#include <tuple>

#include "tests/moe_test_support.h"

namespace kvc::moe {

inline constexpr uint32_t kSlot = 0;
inline constexpr size_t kIds = 1;  // the column whose rows are blank if their rank is masked

inline GroupConfig surviving() {
  GroupConfig config = Stepper::config();
  config.survive = true;
  return config;
}

// Sizes differ from step to step, so that stores of an older step would land in other ranks' rows.
inline Step random_step(uint64_t seed, uint32_t ranks) {
  Step step;
  step.seed = seed;
  std::mt19937 random(static_cast<uint32_t>(seed));
  for (uint32_t rank = 0; rank < ranks; ++rank) step.sizes.push_back(random() % 9);
  step.owners = equal_blocks(ranks);
  step.top_k = 1 + seed % 4;
  step.shapes = {{16U * (1 + static_cast<uint32_t>(random() % 20)), false}, {16, true}};
  step.hidden = 8 * (1 + static_cast<uint32_t>(random() % 20));
  step.accumulate = seed % 3 == 0;
  return step;
}

// Runs steps of a rank in a group that survives, and checks the rows of all present ranks.
class Survivor {
 public:
  explicit Survivor(Rank& rank, const GroupConfig& config = surviving()) : Survivor(rank, rank.form(config)) {
    rank.barrier();
  }
  // A rank that has its group already.
  Survivor(Rank& rank, Group& group)
      : rank_(rank),
        group_(group),
        sources_(rank.context, Stepper::kDispatchBytes),
        ids_(rank.context, size_t{Stepper::kMaxTokens} * 32 * 8),
        out_(rank.context, Stepper::kCombineBytes) {}

  // The ranks that steps of this rank go on without, once the enqueued launches have ended.
  uint32_t masked() const {
    rank_.finish();
    return group_.masked();
  }
  void prepare(const Step& step) {
    if (step.owners != owners_) must(group_.place(owners_ = step.owners));
    const std::vector<int64_t> ids = step.ids(rank_.rank);
    std::vector<int32_t> narrow(ids.begin(), ids.end());
    put(rank_.context, ids_.data(), narrow.data(), narrow.size() * 4);
    columns_.clear();
    size_t at = 0;
    for (size_t i = 0; i < step.shapes.size(); ++i) {
      const std::vector<std::byte> data = step.column(rank_.rank, i);
      put(rank_.context, sources_.data() + at, data.data(), data.size());
      columns_.push_back(
          {sources_.data() + at, step.shapes[i].row_bytes, step.offset(i), step.shapes[i].to_all, i == kIds});
      at += (data.size() + 63) / 64 * 64;
    }
    const std::vector<uint16_t> out = step.out_before(rank_.rank);
    put(rank_.context, out_.data(), out.data(), out.size() * 2);
  }
  void dispatch(const Step& step, uint32_t phases) {
    must(group_.dispatch(rank_.stream(), kSlot, step.sizes, ids_.data(), 4, step.top_k, columns_, phases));
  }
  void combine(const Step& step, uint32_t phases) {
    must(group_.combine(rank_.stream(), kSlot, step.sizes, out_.data(), step.hidden, step.accumulate, phases));
  }
  // Checks the rows that dispatch brought, and writes the experts' results.
  void experts(const Step& step) {
    const uint32_t gone = masked();
    const std::vector<unsigned char> area = get(rank_.context, dispatch_area(), Stepper::kDispatchBytes);
    std::vector<unsigned char> wanted = area;
    step.dispatch(wanted, rank_.rank);
    for (uint32_t source = 0; source < step.ranks(); ++source) {
      for (size_t i = 0; i < step.shapes.size(); ++i) {
        const uint64_t bytes = uint64_t{step.sizes[source]} * step.shapes[i].row_bytes;
        unsigned char* const rows = wanted.data() + step.offset(i) + step.before(source) * step.shapes[i].row_bytes;
        if ((gone >> source & 1U) == 0) continue;
        if (i == kIds) {
          std::memset(rows, 0xFF, bytes);
        } else {
          std::memcpy(rows, area.data() + (rows - wanted.data()), bytes);  // of no meaning
        }
      }
    }
    ASSERT_EQ(area, wanted) << "step " << step.seed << ", rank " << rank_.rank << ", masked " << gone;
    std::vector<unsigned char> results(Stepper::kCombineBytes, 0xEE);
    for (uint32_t row = 0; row < step.rows(); ++row) {
      const std::vector<uint16_t> values = step.result(rank_.rank, row);
      std::memcpy(results.data() + size_t{row} * step.hidden * 2, values.data(), values.size() * 2);
    }
    put(rank_.context, group_.base() + group_.layout().combine(kSlot), results.data(), results.size());
  }
  // Each row is the sum over all present ranks. A rank that is masked during combine may be in a row or not, as a whole.
  void check(const Step& step, uint32_t masked_before) {
    const uint32_t gone = masked();
    EXPECT_FALSE(group_.fault().has_value()) << "step " << step.seed;
    const auto bytes = get(rank_.context, out_.data(), size_t{step.sizes[rank_.rank]} * step.hidden * 2);
    for (uint32_t token = 0; token < step.sizes[rank_.rank]; ++token) {
      std::vector<uint16_t> row(step.hidden);
      std::memcpy(row.data(), bytes.data() + size_t{token} * step.hidden * 2, row.size() * 2);
      const auto is = [&](uint32_t absent) {
        const std::vector<uint16_t> sum = sum_of(step, token, absent);
        return std::equal(row.begin(), row.end(), sum.begin(), Step::same);
      };
      EXPECT_TRUE(is(gone) || (gone != masked_before && is(masked_before)))
          << "step " << step.seed << ", rank " << rank_.rank << ", token " << token << ", masked " << gone;
    }
  }
  void run(const Step& step) {
    prepare(step);
    dispatch(step, kSend | kReceive);
    experts(step);
    const uint32_t before = masked();
    combine(step, kSend | kReceive);
    check(step, before);
  }
  unsigned char* dispatch_area() const { return group_.base() + group_.layout().dispatch(kSlot); }

 private:
  // By the definition of a sum: in rank order, in fp32, rounded once.
  std::vector<uint16_t> sum_of(const Step& step, uint32_t token, uint32_t absent) const {
    const std::vector<uint16_t> before = step.out_before(rank_.rank);
    const std::vector<int64_t> chosen = step.ids(rank_.rank);
    std::vector<uint16_t> sum(step.hidden);
    for (uint32_t i = 0; i < step.hidden; ++i) {
      float total = 0;
      for (uint32_t rank = 0; rank < step.ranks(); ++rank) {
        if ((absent >> rank & 1U) != 0 || !step.wanted(chosen, token, rank)) continue;
        const uint32_t row = step.before(rank_.rank) + token;
        if (!results_.contains({step.seed, rank, row})) results_[{step.seed, rank, row}] = step.result(rank, row);
        total += std::bit_cast<float>(uint32_t{results_[{step.seed, rank, row}][i]} << 16);
      }
      if (step.accumulate) total += std::bit_cast<float>(uint32_t{before[size_t{token} * step.hidden + i]} << 16);
      sum[i] = Step::nearest(total);
    }
    return sum;
  }

  Rank& rank_;
  Group& group_;
  Place sources_;
  Place ids_;
  Place out_;
  std::vector<ColumnSpec> columns_;
  std::vector<uint32_t> owners_;
  mutable std::map<std::tuple<uint64_t, uint32_t, uint32_t>, std::vector<uint16_t>> results_;
};

inline uint64_t now_us() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

// Waits until the process has ended. run_ranks() still collects it.
inline void wait_for_end(const RankProcess& process) {
  siginfo_t info{};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(process.pid), &info, WEXITED | WNOWAIT), 0);
}

// A thread of the group's rank that passes on the parent's report of an end.
class Fence {
 public:
  Fence(Rank& rank, uint32_t victim)
      : thread_([&rank, victim] {
          if (rank.parent().receive()) rank.group->fence(victim);
        }) {}
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;
  ~Fence() { thread_.join(); }

 private:
  std::thread thread_;
};

}  // namespace kvc::moe
