// WorkSlots: what was posted on a link and has not ended, each in a slot by which its end is told.
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
  // The slot of one more; nothing: all are in use.
  std::optional<uint32_t> put(WorkId work) noexcept {
    const auto slot = static_cast<uint32_t>(std::countr_one(used_));
    if (slot >= kSlots) return std::nullopt;
    used_ |= 1U << slot;
    works_[slot] = work;
    return slot;
  }
  bool full() const noexcept { return static_cast<uint32_t>(std::countr_one(used_)) >= kSlots; }
  // It has ended (or was not posted after all): its work. Nothing: there is none, and whoever says so is out of its
  // senses.
  std::optional<WorkId> take(uint32_t slot) noexcept {
    if (slot >= kSlots || (used_ & (1U << slot)) == 0) return std::nullopt;
    used_ &= ~(1U << slot);
    return works_[slot];
  }
  // The slots in use, a bit each.
  uint32_t used() const noexcept { return used_; }
  // The link has ended: calls `use(WorkId)` for each.
  template <typename Use>
  void clear(Use&& use) {
    for (; used_ != 0; used_ &= used_ - 1) use(works_[static_cast<size_t>(std::countr_zero(used_))]);
  }

 private:
  std::array<WorkId, kSlots> works_{};
  uint32_t used_ = 0;
};

// The messages of one link that the peer's engine has not taken. They can be taken in any order; the slots are the credit
// by which a peer that does not read holds up nobody but its sender.
using SentMessages = WorkSlots<kMessageSlots>;

}  // namespace kvc
