// LinkTally: how many pages each counter was raised by over one link, in one direction.
//
// Both ends keep one for a link that has others beside it: the sender of what it posted, the receiver of what landed.
// When the link breaks, the difference is what still has to be counted over the other links (link_keeper.h).
//
// Memory: 4 bytes a slot of the peer's (or own) immediates, 1,024 slots at a time as they come into use, so 256 KiB
// once all 65,536 have been. Counts are kept modulo 2^21: only differences matter, and those are bounded by what is in
// flight on a link (a page counts as 256 bytes of its window at least, so 512 Ki pages of even a 128 MiB window).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lane/immediate.h"

namespace kvc {

class LinkTally {
 public:
  static constexpr uint32_t kModulus = 1U << 21;

  // Raises the immediate's counter by its multiplicity. A newer generation of a slot replaces the older one, whose
  // transfers are over; an older one that comes late is not counted.
  void add(uint32_t immediate);
  // Pages modulo kModulus (0: none so far). Nothing: a newer generation of this slot has been seen.
  std::optional<uint32_t> pages(uint32_t immediate) const;
  void clear() { chunks_.clear(); }

 private:
  // used (1 bit) | generation (10) | pages (21)
  static constexpr uint32_t kUsed = 1U << 31;
  static constexpr uint32_t kChunkSlots = 1024;
  static constexpr uint32_t kChunks = (1U << Immediate::kSlotBits) / kChunkSlots;
  using Chunk = std::array<uint32_t, kChunkSlots>;

  std::vector<std::unique_ptr<Chunk>> chunks_;  // empty or kChunks: most links never have one
};

}  // namespace kvc
