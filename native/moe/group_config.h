// GroupConfig: the facts that an expert group is made for.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "cuda/moe_launch.h"

namespace kvc::moe {

inline constexpr uint32_t kMaxSurvivingHidden = 2 * kMaxThreads * 8;
inline constexpr uint32_t kMaxRowBytes = 1U << 24;             // a kernel's threads count the bytes of a row in 32 bits
inline constexpr uint32_t kMaxGroupTokens = 1U << 24;          // of a rank; rows are numbered in 32 bits
inline constexpr uint64_t kLongestNs = 1'000'000'000'000'000;  // added to any clock's time, it does not overflow

struct GroupConfig {
  uint32_t rank = 0;
  uint32_t ranks = 1;           // up to kMaxRanks
  int device = -1;              // the GPU's ordinal among the visible GPUs; -1: host memory
  uint64_t dispatch_bytes = 0;  // per slot: all columns of all ranks' rows
  uint64_t combine_bytes = 0;   // per slot: the results for all ranks' rows
  uint32_t max_tokens = 0;      // most tokens of one rank in a step
  uint32_t experts = 0;
  uint32_t slots = 1;
  // Time that a launch waits for another rank. It counts only while that rank does not wait itself: a rank that waits
  // is late because of a third one. A wait as a whole ends after `ranks` times as long.
  uint64_t timeout_ns = 0;
  // Launches go on without a rank that lose() names or that does not send within the timeout. Its results count as
  // zero, and its tokens belong to no expert. A row of more than kMaxSurvivingHidden elements is refused.
  bool survive = false;
  // The epoch before the first dispatch, the same on all ranks. Only tests set it, to start shortly before it wraps
  // around.
  uint32_t first_epoch = 0;
};

// Returns the first reason why there can be no such group.
Status check(const GroupConfig& config);

}  // namespace kvc::moe
