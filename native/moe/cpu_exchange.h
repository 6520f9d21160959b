// Dispatch and combine on a CPU: the state machine of cuda/moe_kernels.cuh, over memory that all ranks of a node map.
// Groups without a GPU run it, and so does the stand-in for the CUDA driver, in place of the kernels. The segments of
// ranks on other nodes are null in a launch: their rows and results come by a FarSlot.
//
// Both functions return when the launch has ended. They block while they wait for other ranks, at most for the launch's
// timeout. Any thread may call them, with one launch of a slot at a time.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "cuda/moe_launch.h"
#include "moe/far_slot.h"

namespace kvc::moe::cpu_exchange {

inline std::atomic_ref<uint32_t> word(uint32_t& value) noexcept { return std::atomic_ref(value); }
inline std::atomic_ref<uint32_t> flag_of(unsigned char* segment, uint64_t flags, uint32_t rank) noexcept {
  return word(*reinterpret_cast<uint32_t*>(segment + flags + uint64_t{rank} * kFlagBytes));
}

using Clock = std::chrono::steady_clock;

// Records the first fault. Later launches of the slot do nothing.
template <typename Launch>
void record_fault(const Launch& launch, Fault fault, uint32_t rank) {
  uint32_t none = 0;
  word(launch.host->fault).compare_exchange_strong(none, static_cast<uint32_t>(fault) << 16 | rank);
  word(launch.control->faulted).store(1);
}

// The time of a wait, as far as it counts against each rank. While a rank waits itself, its time does not count, because
// it is late for another reason. Each waiting rank therefore changes its flag in every segment. A far rank has no such
// flag here. A rank sends its packets to all far ranks at once, so only a rank that has not sent is late to them.
template <typename Launch>
class Patience {
 public:
  explicit Patience(const Launch& launch) : launch_(launch), last_(Clock::now()), next_(last_) {
    for (uint32_t rank = 0; rank < launch.ranks; ++rank) seen_[rank] = flag(launch.rank, rank).load();
  }
  // To be called at every poll.
  void poll() {
    const Clock::time_point now = Clock::now();
    const uint64_t pause = launch_.timeout_ns / kPauses + 1;
    const uint64_t passed = std::min(pause, static_cast<uint64_t>(std::chrono::nanoseconds(now - last_).count()));
    last_ = now;
    waited_ += passed;
    for (uint32_t rank = 0; rank < launch_.ranks; ++rank) {
      const uint32_t seen = flag(launch_.rank, rank).load();
      counted_[rank] = seen == seen_[rank] ? counted_[rank] + passed : 0;
      seen_[rank] = seen;
    }
    if (now < next_) return;
    next_ = now + std::chrono::nanoseconds(kWaitingNs);
    const auto value = static_cast<uint32_t>(now.time_since_epoch().count() >> 10);  // differs from the one before
    for (uint32_t rank = 0; rank < launch_.ranks; ++rank) {
      if (rank != launch_.rank && launch_.segments[rank] != nullptr) flag(rank, launch_.rank).store(value);
    }
  }
  uint64_t waited() const noexcept { return waited_; }
  // Those of `ranks` whose time is over.
  uint32_t late(uint32_t ranks) const noexcept {
    if (waited_ > launch_.ranks * launch_.timeout_ns) return ranks;
    uint32_t late = 0;
    for (uint32_t rank = 0; rank < launch_.ranks; ++rank) {
      if (counted_[rank] > launch_.timeout_ns) late |= 1U << rank;
    }
    return ranks & late;
  }

 private:
  std::atomic_ref<uint32_t> flag(uint32_t owner, uint32_t rank) const noexcept {
    return flag_of(launch_.segments[owner], launch_.waiting, rank);
  }

  const Launch& launch_;
  Clock::time_point last_;
  Clock::time_point next_;
  uint64_t waited_ = 0;
  std::array<uint64_t, kMaxRanks> counted_{};
  std::array<uint32_t, kMaxRanks> seen_{};
};

// Returns whether the wait for `missing` is over, and records the fault then. The fault names a rank that is gone, or
// one of `late`. `left`: ranks that left in good order before `missing` was read. A rank leaves after its last flag or
// packet, so it cannot be missing by then, unless it never sends.
template <typename Launch>
bool gives_up(const Launch& launch, uint32_t missing, uint32_t left, uint32_t late, Fault timeout) {
  // A rank that ended comes first: others leave because of its end.
  uint32_t lost = word(launch.host->lost).load();
  if (lost == 0) lost = left & missing;
  const bool other = word(launch.host->fault).load() != 0;  // the other slot's fault
  if (lost == 0 && !other && late == 0) return false;
  const uint32_t named = lost != 0 ? lost : late != 0 ? late : missing;
  record_fault(launch, lost != 0 ? Fault::kLost : timeout, static_cast<uint32_t>(std::countr_zero(named)));
  return true;
}

// In a group that survives: returns whether another rank goes on without this rank, and records the fault then.
template <typename Launch>
bool is_evicted(const Launch& launch) {
  if (launch.survive == 0) return false;
  for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
    if (flag_of(launch.segments[launch.rank], launch.evicted, rank).load(std::memory_order_acquire) == 0) continue;
    record_fault(launch, Fault::kEvicted, rank);
    return true;
  }
  return false;
}

// The ranks that a launch of either slot need not wait for.
template <typename Launch>
uint32_t gone_ranks(const Launch& launch) {
  uint32_t gone = word(launch.host->dead).load();
  for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
    if (word(launch.host->masked[rank]).load() != 0) gone |= 1U << rank;
  }
  return gone;
}

// Goes on without `ranks` in this launch and in all later launches of the slot. Their own launches end.
template <typename Launch>
void mask(const Launch& launch, uint32_t ranks) {
  ranks &= ~word(launch.control->masked).load();
  for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
    if ((ranks >> rank & 1U) == 0) continue;
    flag_of(launch.segments[rank], launch.evicted, launch.rank).store(1);
    word(launch.host->masked[rank]).store(1);
  }
  word(launch.control->masked).fetch_or(ranks);
}

// Stores of a rank that is gone may still land where this step has other rows. So the step begins after the end of its
// process. Returns false if it gave up waiting.
template <typename Launch>
bool wait_for_fences(const Launch& launch) {
  if (launch.survive == 0) return true;
  mask(launch, gone_ranks(launch));
  Patience patience(launch);
  for (;;) {
    const uint32_t living = word(launch.control->masked).load() & ~word(launch.host->fenced).load();
    if (living == 0) return true;
    patience.poll();
    const uint32_t left = word(launch.host->left).load();
    const uint32_t late = patience.waited() > launch.timeout_ns ? living : 0;
    if (is_evicted(launch) || gives_up(launch, living, left, late, Fault::kDispatchTimeout)) return false;
    std::this_thread::yield();
  }
}

// Passes the rank of a failed packet on to this launch and all later ones.
template <typename Launch>
void note_lost(const Launch& launch, const FarSlot& far) {
  uint32_t none = 0;
  if (const uint32_t lost = far.lost(); lost != 0) word(launch.host->lost).compare_exchange_strong(none, lost);
}

// Waits for the memory of an earlier packet. Returns false if it gave up. A timeout names this rank, because it has not
// sent, and which lane holds the memory is not known.
template <typename Launch>
bool wait_to_send(const Launch& launch, const FarSlot& far, Fault timeout) {
  Patience patience(launch);
  while (!far.can_send(launch)) {
    patience.poll();
    note_lost(launch, far);
    const uint32_t left = word(launch.host->left).load();
    const uint32_t late = patience.waited() > launch.timeout_ns ? 1U << launch.rank : 0;
    if (gives_up(launch, far.ranks(), left, late, timeout)) return false;
    std::this_thread::yield();
  }
  return true;
}

// Returns false if it gave up waiting. A group that survives goes on without ranks that are dead or late.
template <typename Launch>
bool wait_for_flags(const Launch& launch, uint64_t flags, uint32_t epoch, Fault timeout, FarSlot* far = nullptr) {
  Patience patience(launch);
  for (;;) {
    const uint32_t left = word(launch.host->left).load();  // before the flags: see gives_up()
    if (far != nullptr) far->receive(launch);
    const uint32_t masked = word(launch.control->masked).load();
    uint32_t missing = 0;
    for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
      if ((masked >> rank & 1U) != 0) continue;
      const uint32_t flag = flag_of(launch.segments[launch.rank], flags, rank).load(std::memory_order_acquire);
      if (static_cast<int32_t>(flag - epoch) < 0) missing |= 1U << rank;
    }
    if (missing == 0) return true;
    patience.poll();
    const uint32_t late = patience.late(missing);
    if (far != nullptr) note_lost(launch, *far);
    if (is_evicted(launch)) return false;
    if (launch.survive != 0 && word(launch.host->lost).load() == 0) {
      uint32_t gone = missing & gone_ranks(launch);
      if (gone == 0) gone = late;
      if (gone != 0) {
        mask(launch, gone);
        continue;
      }
    }
    if (gives_up(launch, missing, left, late, timeout)) return false;
    std::this_thread::yield();
  }
}

template <typename Launch>
void raise_flags(const Launch& launch, uint64_t flags, uint32_t epoch) {
  const uint32_t masked = word(launch.control->masked).load();
  for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
    if ((masked >> rank & 1U) != 0 || launch.segments[rank] == nullptr) continue;
    flag_of(launch.segments[rank], flags, launch.rank).store(epoch, std::memory_order_release);
  }
}

// The rows of masked ranks have old bytes. Without ids they belong to no expert.
inline void blank_masked(const DispatchLaunch& launch) {
  const uint32_t masked = word(launch.control->masked).load();
  if (masked == 0) return;
  uint64_t own = 0;  // rows before the own ones
  for (uint32_t rank = 0; rank < launch.rank; ++rank) own += launch.sizes[rank];
  for (uint32_t i = 0; i < launch.column_count; ++i) {
    const Column& column = launch.columns[i];
    if (column.blank == 0) continue;
    unsigned char* rows = launch.segments[launch.rank] + column.target - own * column.row_bytes;
    for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
      const uint64_t bytes = uint64_t{launch.sizes[rank]} * column.row_bytes;
      if ((masked >> rank & 1U) != 0) std::memset(rows, 0xFF, bytes);
      rows += bytes;
    }
  }
}

inline uint32_t ranks_of(const DispatchLaunch& launch, uint32_t token) noexcept {
  if (launch.experts_per_rank == 0 && launch.owners == nullptr) return (1U << launch.ranks) - 1;
  uint32_t mask = 0;
  for (uint32_t i = 0; i < launch.top_k; ++i) {
    const uint64_t index = uint64_t{token} * launch.top_k + i;
    const int64_t id = launch.ids_bytes == 8 ? static_cast<const int64_t*>(launch.ids)[index]
                                             : static_cast<const int32_t*>(launch.ids)[index];
    if (id < 0 || id >= launch.experts) continue;
    const auto expert = static_cast<uint32_t>(id);
    mask |= 1U << (launch.owners != nullptr ? launch.owners[expert] : expert / launch.experts_per_rank);
  }
  return mask;
}

// `far`: the ranks whose segments are null; null: all segments are mapped.
inline void dispatch(const DispatchLaunch& launch, FarSlot* far = nullptr) {
  if (word(launch.control->faulted).load() != 0 || is_evicted(launch)) return;
  if ((launch.phases & kSend) != 0) {
    if (!wait_for_fences(launch)) return;
    if (far != nullptr && !wait_to_send(launch, *far, Fault::kDispatchTimeout)) return;
    uint32_t all = ((1U << launch.ranks) - 1) & ~word(launch.control->masked).load();
    for (uint32_t token = 0; token < launch.tokens; ++token) launch.masks[token] = ranks_of(launch, token) & all;
    ++launch.control->epoch;
    if (far != nullptr) {
      far->send(launch);  // first, because a lane takes longer than the copies
      all &= ~far->ranks();
    }
    for (uint32_t token = 0; token < launch.tokens; ++token) {
      const uint32_t mask = launch.masks[token] & all;
      for (uint32_t i = 0; i < launch.column_count; ++i) {
        const Column& column = launch.columns[i];
        const uint64_t row = uint64_t{token} * column.row_bytes;
        for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
          if (((column.to_all != 0 ? all : mask) >> rank & 1U) == 0) continue;
          std::memcpy(launch.segments[rank] + column.target + row, column.source + row, column.row_bytes);
        }
      }
    }
    raise_flags(launch, launch.arrived, launch.control->epoch);
  }
  if ((launch.phases & kReceive) != 0 &&
      wait_for_flags(launch, launch.arrived, launch.control->epoch, Fault::kDispatchTimeout, far)) {
    blank_masked(launch);
  }
}

inline float from_bf16(uint16_t bits) noexcept { return std::bit_cast<float>(uint32_t{bits} << 16); }
// Rounds to nearest, ties to even. A NaN stays a NaN.
inline uint16_t to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return 0x7fffU;
  return static_cast<uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

inline void combine(const CombineLaunch& launch, FarSlot* far = nullptr) {
  if (word(launch.control->faulted).load() != 0 || is_evicted(launch)) return;
  const uint32_t epoch = launch.control->epoch;
  if ((launch.phases & kSend) != 0) {
    if (far != nullptr) {
      if (!wait_to_send(launch, *far, Fault::kCombineTimeout)) return;
      far->send(launch);
    }
    raise_flags(launch, launch.ready, epoch);
  }
  if ((launch.phases & kReceive) == 0) return;
  if (!wait_for_flags(launch, launch.ready, epoch, Fault::kCombineTimeout, far)) return;
  const uint32_t columns = launch.vectors * 8;
  const uint64_t row_bytes = uint64_t{columns} * sizeof(uint16_t);
  const uint32_t masked = word(launch.control->masked).load();
  std::array<const unsigned char*, kMaxRanks> results{};  // where each rank's next result is
  for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
    if (launch.segments[rank] != nullptr) {
      results[rank] = launch.segments[rank] + launch.rows;
    } else if (far != nullptr) {
      results[rank] = far->results(rank);
    }
  }
  for (uint32_t token = 0; token < launch.tokens; ++token) {
    const uint32_t mask = launch.masks[token] & ~masked;
    auto* out = reinterpret_cast<uint16_t*>(launch.out + token * row_bytes);
    for (uint32_t i = 0; i < columns; ++i) {
      float sum = 0;
      for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
        if ((mask >> rank & 1U) == 0) continue;
        sum += from_bf16(reinterpret_cast<const uint16_t*>(results[rank])[i]);
      }
      if (launch.accumulate != 0) sum += from_bf16(out[i]);
      out[i] = to_bf16(sum);
    }
    for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
      if (launch.segments[rank] != nullptr || (mask >> rank & 1U) != 0) results[rank] += row_bytes;
    }
  }
  // A rank that goes on without this rank may have overwritten its results meanwhile. It has set the flag before.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  is_evicted(launch);
}

}  // namespace kvc::moe::cpu_exchange
