#include "bench/expert_steps.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "bench/checked.h"

namespace kvc::bench {
namespace {

constexpr uint16_t kOne = 0x3F80;  // in bf16, whose bits are the upper half of a float's
constexpr uint64_t kPatienceNs = std::chrono::nanoseconds(kPatience).count();

}  // namespace

ExpertSteps::ExpertSteps(const std::vector<DomainConfig>& domains, const std::vector<DomainConfig>& peer_domains,
                         uint32_t spin_us, uint32_t peers, uint32_t tokens, uint32_t row_bytes, bool timed)
    : row_bytes_(row_bytes),
      sizes_(peers + 1, tokens),
      rows_(uint64_t{tokens} * row_bytes / sizeof(uint16_t), kOne),
      columns_{{rows_.data(), row_bytes, 0}},
      ranks_(peers + 1) {
  const auto count = static_cast<uint32_t>(ranks_.size());
  const uint32_t most = std::max(tokens, 1U);  // a group has room for one token at least
  for (uint32_t i = 0; i < count; ++i) {
    EngineConfig engine;
    engine.name = "rank " + std::to_string(i);
    engine.domains = i == 0 ? domains : peer_domains;
    engine.spin_us = i == 0 ? spin_us : 0;  // only the transfer thread of rank 0 is measured
    if (i == 0 && timed) engine.open = TimedDomain::factory(clock_);
    const uint32_t others = ((1U << count) - 1) & ~(1U << i);
    const moe::FarConfig far{i, count, others, 1, most, row_bytes, row_bytes / 2};
    ranks_[i].far = checked(moe::FarRanks::create(std::move(engine), far));
    moe::GroupConfig group;
    group.rank = i;
    group.ranks = count;
    group.dispatch_bytes = group.combine_bytes = uint64_t{count} * most * row_bytes;
    group.max_tokens = most;
    group.experts = count;
    group.timeout_ns = kPatienceNs;
    ranks_[i].group = checked(moe::Group::create(group));
    ranks_[i].sums.resize(rows_.size());
    // What the experts of this rank would return.
    unsigned char* const results = ranks_[i].group->base() + ranks_[i].group->layout().combine(0);
    for (uint32_t rank = 0; rank < count; ++rank) {
      std::copy(rows_.begin(), rows_.end(), reinterpret_cast<uint16_t*>(results) + rank * rows_.size());
    }
  }
  for (uint32_t low = 0; low < count; ++low) {
    for (uint32_t high = low + 1; high < count; ++high) connect(low, high);
  }
  for (Rank& rank : ranks_) {
    checked(rank.far->begin());
    checked(rank.group->join(*rank.far));
  }
}

void ExpertSteps::connect(uint32_t low, uint32_t high) {
  moe::FarRanks& one = *ranks_[low].far;
  moe::FarRanks& other = *ranks_[high].far;
  const Bytes accepted = checked(other.accept(low, checked(one.offer(high))));
  checked(other.meet(low, checked(one.complete(high, accepted))));
}

void ExpertSteps::dispatch(Rank& rank, uint32_t phases) {
  checked(rank.group->dispatch(nullptr, 0, sizes_, nullptr, sizeof(uint32_t), 1, columns_, phases));
}

void ExpertSteps::combine(Rank& rank, uint32_t phases) {
  checked(rank.group->combine(nullptr, 0, sizes_, rank.sums.data(), row_bytes_ / sizeof(uint16_t), false, phases));
}

template <typename Call>
void ExpertSteps::run(ExpertPhase& phase, Call call) {
  clock_.reset();
  const int64_t start = PostClock::now();
  call(ranks_.front(), moe::kSend);
  const int64_t sent = PostClock::now();
  for (size_t i = 1; i < ranks_.size(); ++i) call(ranks_[i], moe::kSend);
  for (Rank& rank : ranks_) call(rank, moe::kReceive);
  // All ranks have the packets of rank 0, so its first write has been posted, and no later one begins.
  phase.submit.push_back(static_cast<double>(sent - start));
  phase.first.push_back(static_cast<double>(clock_.first() - sent));
}

ExpertTimes ExpertSteps::steps(uint32_t iterations) {
  ExpertTimes times;
  for (uint32_t i = 0; i < iterations; ++i) {
    run(times.dispatch, [this](Rank& rank, uint32_t phases) { dispatch(rank, phases); });
    run(times.combine, [this](Rank& rank, uint32_t phases) { combine(rank, phases); });
  }
  check();
  return times;
}

void ExpertSteps::check() const {
  const auto sum = static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(ranks_.size())) >> 16);
  for (const Rank& rank : ranks_) {
    if (rank.group->fault()) throw std::runtime_error("a step of the experts ended early");
    if (std::any_of(rank.sums.begin(), rank.sums.end(), [sum](uint16_t value) { return value != sum; })) {
      throw std::runtime_error("the experts' sums are wrong");
    }
  }
}

}  // namespace kvc::bench
