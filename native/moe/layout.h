// Layout: the positions in a rank's segment: flags, then a dispatch area and a combine area for each slot. All ranks
// have the same layout, so an offset is valid in every segment.
#pragma once

#include <cstdint>

#include "cuda/moe_launch.h"

namespace kvc::moe {

inline constexpr uint32_t kMaxSlots = 2;  // two micro-batches in flight
// Areas are aligned for any vector and for any page that a framework may require.
inline constexpr uint64_t kAreaAlignment = 4096;
// Columns begin at cache lines.
inline constexpr uint64_t kColumnAlignment = 256;

struct Layout {
  uint64_t dispatch_bytes = 0;  // of a slot
  uint64_t combine_bytes = 0;   // of a slot

  static constexpr uint64_t align(uint64_t bytes) noexcept {
    return (bytes + kAreaAlignment - 1) / kAreaAlignment * kAreaAlignment;
  }
  // The flags that ranks set when their rows or their results are complete.
  static constexpr uint64_t arrived(uint32_t slot) noexcept { return (2ULL * slot) * kMaxRanks * kFlagBytes; }
  static constexpr uint64_t ready(uint32_t slot) noexcept { return (2ULL * slot + 1) * kMaxRanks * kFlagBytes; }
  // The flags that other ranks set when they go on without the owner of the segment.
  static constexpr uint64_t evicted() noexcept { return 2ULL * kMaxSlots * kMaxRanks * kFlagBytes; }
  // The flags that change as long as a rank waits in a launch of the slot.
  static constexpr uint64_t waiting(uint32_t slot) noexcept {
    return evicted() + (1ULL + slot) * kMaxRanks * kFlagBytes;
  }
  static constexpr uint64_t flag_bytes() noexcept { return align(waiting(kMaxSlots)); }

  constexpr uint64_t dispatch(uint32_t slot) const noexcept {
    return flag_bytes() + slot * (align(dispatch_bytes) + align(combine_bytes));
  }
  constexpr uint64_t combine(uint32_t slot) const noexcept { return dispatch(slot) + align(dispatch_bytes); }
  constexpr uint64_t bytes(uint32_t slots) const noexcept { return dispatch(slots); }
};

}  // namespace kvc::moe
