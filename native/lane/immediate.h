// Immediate: the 32-bit value of a WriteImm, made of slot, generation and multiplicity.
#pragma once

#include <cstdint>

namespace kvc {

// Field widths. Every fabric carries 32 bits (verbs imm_data, EFA remote CQ data).
//  - slot, 16 bits: one counter per layer and request in flight. 65,536 slots hold 800 requests of an 80-layer model.
//  - generation, 10 bits: raised each time a slot changes owner. Slots are reused in FIFO order, so 1,024 generations
//    are 65,536 x 1,024 allocations. A write that is this late was fenced long before.
//  - multiplicity, 6 bits, stored minus one: the number of pages that this immediate counts, 1 to 64. In the paper,
//    chains above 4 gained nothing on RC. 64 keeps the per-frame cost of tcp and host below 1 % at 4 KiB pages.
struct Immediate {
  static constexpr uint32_t kSlotBits = 16;
  static constexpr uint32_t kGenerationBits = 10;
  static constexpr uint32_t kMultiplicityBits = 6;
  static constexpr uint32_t kMaxMultiplicity = 1U << kMultiplicityBits;

  uint32_t slot = 0;
  uint32_t generation = 0;
  uint32_t multiplicity = 1;  // 1..kMaxMultiplicity

  constexpr uint32_t encode() const noexcept {
    return (slot << (kGenerationBits + kMultiplicityBits)) | (generation << kMultiplicityBits) | (multiplicity - 1);
  }
  static constexpr Immediate decode(uint32_t raw) noexcept {
    return Immediate{raw >> (kGenerationBits + kMultiplicityBits),
                     (raw >> kMultiplicityBits) & ((1U << kGenerationBits) - 1), (raw & (kMaxMultiplicity - 1)) + 1};
  }
  // Returns the immediate of the same counter, for `pages` pages.
  static constexpr uint32_t with_multiplicity(uint32_t raw, uint32_t pages) noexcept {
    return (raw & ~(kMaxMultiplicity - 1)) | (pages - 1);
  }
};

}  // namespace kvc
