// Dispatch and combine on a CPU: the state machine of cuda/moe_kernels.cuh, over memory that all ranks map. Groups
// without a GPU run it, and so does the stand-in for the CUDA driver, in place of the kernels.
//
// Both functions return when the launch has ended. They block while they wait for other ranks, at most for the launch's
// timeout. Any thread may call them, with one launch of a slot at a time.
#pragma once

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "cuda/moe.h"

namespace kvc::moe::reference {

inline std::atomic_ref<uint32_t> word(uint32_t& value) noexcept { return std::atomic_ref(value); }
inline std::atomic_ref<uint32_t> flag_of(unsigned char* segment, uint64_t flags, uint32_t rank) noexcept {
  return word(*reinterpret_cast<uint32_t*>(segment + flags + uint64_t{rank} * kFlagBytes));
}

// Returns false if it gave up waiting, and records the fault. The fault names a rank that is gone, or one whose flag is
// not set.
template <typename Launch>
bool wait_for_flags(const Launch& launch, uint64_t flags, uint32_t epoch, Fault timeout) {
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    uint32_t missing = 0;
    for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
      const uint32_t flag = flag_of(launch.segments[launch.rank], flags, rank).load(std::memory_order_acquire);
      if (static_cast<int32_t>(flag - epoch) < 0) missing |= 1U << rank;
    }
    if (missing == 0) return true;
    const uint32_t lost = word(launch.host->lost).load() | (word(launch.host->left).load() & missing);
    const bool other = word(launch.host->fault).load() != 0;  // the other slot's fault
    const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - begin;
    if (lost != 0 || other || static_cast<uint64_t>(waited.count()) > launch.timeout_ns) {
      const auto rank = static_cast<uint32_t>(std::countr_zero(lost != 0 ? lost : missing));
      uint32_t none = 0;  // only the first fault is recorded
      word(launch.host->fault)
          .compare_exchange_strong(none, static_cast<uint32_t>(lost != 0 ? Fault::kLost : timeout) << 16 | rank);
      word(launch.control->faulted).store(1);
      return false;
    }
    std::this_thread::yield();
  }
}

template <typename Launch>
void raise_flags(const Launch& launch, uint64_t flags, uint32_t epoch) {
  for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
    flag_of(launch.segments[rank], flags, launch.rank).store(epoch, std::memory_order_release);
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

inline void dispatch(const DispatchLaunch& launch) {
  if (word(launch.control->faulted).load() != 0) return;
  if ((launch.phases & kSend) != 0) {
    const uint32_t all = (1U << launch.ranks) - 1;
    for (uint32_t token = 0; token < launch.tokens; ++token) {
      const uint32_t mask = launch.masks[token] = ranks_of(launch, token);
      for (uint32_t i = 0; i < launch.column_count; ++i) {
        const Column& column = launch.columns[i];
        const uint64_t row = uint64_t{token} * column.row_bytes;
        for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
          if (((column.to_all != 0 ? all : mask) >> rank & 1U) == 0) continue;
          std::memcpy(launch.segments[rank] + column.target + row, column.source + row, column.row_bytes);
        }
      }
    }
    raise_flags(launch, launch.arrived, ++launch.control->epoch);
  }
  if ((launch.phases & kReceive) != 0) {
    wait_for_flags(launch, launch.arrived, launch.control->epoch, Fault::kDispatchTimeout);
  }
}

inline float from_bf16(uint16_t bits) noexcept { return std::bit_cast<float>(uint32_t{bits} << 16); }
// Rounds to nearest, ties to even. A NaN stays a NaN.
inline uint16_t to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return 0x7fffU;
  return static_cast<uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

inline void combine(const CombineLaunch& launch) {
  if (word(launch.control->faulted).load() != 0) return;
  const uint32_t epoch = launch.control->epoch;
  if ((launch.phases & kSend) != 0) raise_flags(launch, launch.ready, epoch);
  if ((launch.phases & kReceive) == 0) return;
  if (!wait_for_flags(launch, launch.ready, epoch, Fault::kCombineTimeout)) return;
  const uint32_t columns = launch.vectors * 8;
  for (uint32_t token = 0; token < launch.tokens; ++token) {
    const uint32_t mask = launch.masks[token];
    const uint64_t row = uint64_t{token} * columns * sizeof(uint16_t);
    auto* out = reinterpret_cast<uint16_t*>(launch.out + row);
    for (uint32_t i = 0; i < columns; ++i) {
      float sum = 0;
      for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
        const auto* part = reinterpret_cast<const uint16_t*>(launch.segments[rank] + launch.rows + row);
        sum += (mask >> rank & 1U) != 0 ? from_bf16(part[i]) : 0.0F;
      }
      if (launch.accumulate != 0) sum += from_bf16(out[i]);
      out[i] = to_bf16(sum);
    }
  }
}

}  // namespace kvc::moe::reference
