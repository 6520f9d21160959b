// WorkSlots: the work posted on a link and not ended. Each item has a slot, and its completion names the slot.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <optional>

#include "lane/domain.h"

namespace kvc {

// One owner thread.
template <uint32_t kSlots>
class WorkSlots {
  static_assert(kSlots <= 32);

 public:
  // Returns the slot for `work`. No value: all slots are in use.
  std::optional<uint32_t> put(WorkId work) noexcept {
    const auto slot = static_cast<uint32_t>(std::countr_one(used_));
    if (slot >= kSlots) return std::nullopt;
    used_ |= 1U << slot;
    works_[slot] = work;
    return slot;
  }
  bool full() const noexcept { return static_cast<uint32_t>(std::countr_one(used_)) >= kSlots; }
  // Ends the work in `slot` (or takes back work that was not posted). No value: the slot is free, so the caller's
  // report is wrong.
  std::optional<WorkId> take(uint32_t slot) noexcept {
    if (slot >= kSlots || (used_ & (1U << slot)) == 0) return std::nullopt;
    used_ &= ~(1U << slot);
    return works_[slot];
  }
  // One bit for each slot in use.
  uint32_t used() const noexcept { return used_; }
  // Frees all slots at the end of the link. Calls `use(WorkId)` for each.
  template <typename Use>
  void clear(Use&& use) {
    for (; used_ != 0; used_ &= used_ - 1) use(works_[static_cast<size_t>(std::countr_zero(used_))]);
  }

 private:
  std::array<WorkId, kSlots> works_{};
  uint32_t used_ = 0;
};

// The messages of one link that the peer's transfer engine has not taken, in any order. The slots are the sender's
// credit, so that a peer that does not read blocks only its own sender.
using SentMessages = WorkSlots<kMessageSlots>;

}  // namespace kvc
