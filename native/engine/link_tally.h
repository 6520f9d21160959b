// LinkTally: the number of pages by which each counter was raised over one link, in one direction.
//
// If a link has others beside it, both ends keep a tally: the sender of what it posted, the receiver of what landed. If
// the link breaks, the difference is what still has to be counted over the other links (link_keeper.h).
//
// Memory: 4 bytes per slot of the immediates, allocated for 1,024 slots at a time as they are used, 256 KiB for all
// 65,536. Counts are kept modulo 2^21, because only differences matter. What is in flight on
// a link bounds the differences. A page counts as at least 256 bytes of the link's window, so even a window of 128 MiB
// holds at most 512 Ki pages.
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
  // transfers are over. A late immediate of an older generation is not counted.
  void add(uint32_t immediate);
  // Number of pages modulo kModulus (0: none so far). No value: a newer generation of this slot has been seen.
  std::optional<uint32_t> pages(uint32_t immediate) const;
  void clear() { chunks_.clear(); }

 private:
  // Layout of an entry: used (1 bit) | generation (10) | pages (21).
  static constexpr uint32_t kUsed = 1U << 31;
  static constexpr uint32_t kChunkSlots = 1024;
  static constexpr uint32_t kChunks = (1U << Immediate::kSlotBits) / kChunkSlots;
  using Chunk = std::array<uint32_t, kChunkSlots>;

  std::vector<std::unique_ptr<Chunk>> chunks_;  // empty or kChunks entries: most links never need one
};

}  // namespace kvc
