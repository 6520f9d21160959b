// ImmCounterTable: the receiver's counters, one per slot of the 32-bit immediate.
//
// A counter is live from allocate() to release(). An immediate is stale, and changes nothing, if its slot is not live
// or has an owner of another generation. Slots are reused in FIFO order, so that a generation repeats only after 65,536
// x 1,024 allocations.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/transfer_engine.h"
#include "lane/immediate.h"

namespace kvc {

class ImmCounterTable {
 public:
  static constexpr uint32_t kSlots = 1U << Immediate::kSlotBits;
  // The largest count that fits beside the tag: 53 bits, or 256 years at a million a second.
  static constexpr uint64_t kMaxCount = (uint64_t{1} << 53) - 1;

  struct Added {
    bool stale = false;
    bool foreign = false;  // the counter is live, but this peer may not raise it: the count is unchanged
    bool reached = false;  // this add() brought the counter to its target; true exactly once per expect()
    uint64_t owner = 0;    // the `owner` given to allocate(), valid if reached
  };

  // Appends `n` live counters at zero to `immediates`. Returns false and takes none if fewer are free. `raisers`: the
  // peers that may raise them, sorted. Empty: any peer. The list must outlive the counters and every add() that runs
  // while they are released. Any thread; takes a lock, never blocks otherwise.
  bool allocate(uint32_t n, uint64_t owner, const std::vector<PeerId>& raisers, std::vector<uint32_t>& immediates);

  // Ends a live counter: its immediate is stale from now on. Call it once per allocated immediate. Any thread; takes a
  // lock.
  void release(uint32_t immediate);

  // Raises the counter by the immediate's multiplicity, for `peer`. Any thread; lock-free.
  Added add(uint32_t immediate, PeerId peer) noexcept;

  // Sets the target of a live counter that has no target or has reached it. `target` must not exceed kMaxCount. Returns
  // true if the count has reached the target already. For each target, either this call returns true or one add()
  // reports `reached`, never both. Any thread; lock-free.
  bool expect(uint32_t immediate, uint64_t target) noexcept;

  // The count; no value if the immediate is stale. Any thread; lock-free.
  std::optional<uint64_t> value(uint32_t immediate) const noexcept;

  // The `owner` given to allocate(); no value if the immediate is stale. Any thread; lock-free.
  std::optional<uint64_t> owner(uint32_t immediate) const noexcept;

  // Number of live counters.
  uint32_t allocated() const noexcept { return allocated_.load(std::memory_order_relaxed); }

 private:
  // Layout of both words: live or armed (1 bit) | generation (10) | count or target (53). An add() may be overtaken by
  // release() and allocate(). The tag in `target` keeps it from matching the new owner's target.
  struct Slot {
    std::atomic<uint64_t> word{0};
    std::atomic<uint64_t> target{0};
    std::atomic<uint64_t> owner{0};
    // The peers that may raise it. 0: any peer. Odd: one peer, stored as twice its id plus one. Otherwise: the address
    // of a sorted list.
    std::atomic<uint64_t> raisers{0};
  };
  // Memory is allocated for 1,024 slots at a time (32 KiB). A transfer engine with a few requests touches one or two
  // chunks.
  static constexpr uint32_t kChunkSlots = 1024;
  using Chunk = std::array<Slot, kChunkSlots>;

  Slot* find(uint32_t slot) const noexcept;

  std::array<std::atomic<Chunk*>, kSlots / kChunkSlots> chunks_{};
  std::array<std::unique_ptr<Chunk>, kSlots / kChunkSlots> storage_;  // guarded by mutex_
  std::atomic<uint32_t> allocated_{0};

  std::mutex mutex_;
  uint32_t fresh_ = 0;         // slots below this one were handed out at least once; guarded by mutex_
  std::deque<uint16_t> free_;  // released slots, oldest first; guarded by mutex_
};

}  // namespace kvc
