// ImmCounterTable: the receiving side's counters, one per slot of the 32-bit immediate.
//
// A counter is live from allocate() to release(). An immediate whose slot is not live, or that carries another
// generation than the slot's owner, is stale and changes nothing. Slots are reused in FIFO order, so that a
// generation comes round again only after 65,536 x 1,024 allocations.
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
  // Counts above this do not fit beside the tag (53 bits: 256 years at a million a second).
  static constexpr uint64_t kMaxCount = (uint64_t{1} << 53) - 1;

  struct Added {
    bool stale = false;
    bool foreign = false;  // the counter is live, and not this peer's to raise: it was not raised
    bool reached = false;  // this add() brought the counter to its target: true exactly once per expect()
    uint64_t owner = 0;    // valid where reached: what allocate() was given
  };

  // Appends `n` live counters at zero to `immediates`; false if fewer are free (nothing is taken then). `raisers`: sorted,
  // who may raise them; it outlives the counters, and whatever add() is under way as they are released. Empty: anyone.
  // Any thread; takes a lock, never blocks otherwise.
  bool allocate(uint32_t n, uint64_t owner, const std::vector<PeerId>& raisers, std::vector<uint32_t>& immediates);

  // Ends a live counter: from now on its immediate is stale. Once per allocated immediate. Any thread; takes a lock.
  void release(uint32_t immediate);

  // Raises the counter by the immediate's multiplicity, as `peer`. Any thread; lock-free.
  Added add(uint32_t immediate, PeerId peer) noexcept;

  // Sets the target of a live counter that has none, or has reached its last one; target <= kMaxCount. Returns true if the count
  // is there already. Of this call returning true and an add() saying `reached`, exactly one happens, whatever the
  // interleaving. Any thread; lock-free.
  bool expect(uint32_t immediate, uint64_t target) noexcept;

  // The count, or nothing where the immediate is stale. Any thread; lock-free.
  std::optional<uint64_t> value(uint32_t immediate) const noexcept;

  // What allocate() was given, or nothing where the immediate is stale. Any thread; lock-free.
  std::optional<uint64_t> owner(uint32_t immediate) const noexcept;

  // Live counters now.
  uint32_t allocated() const noexcept { return allocated_.load(std::memory_order_relaxed); }

 private:
  // Both words: live or armed (1 bit) | generation (10) | count or target (53). The tag in `target` keeps an add()
  // that was overtaken by release() and allocate() from meeting the new owner's target.
  struct Slot {
    std::atomic<uint64_t> word{0};
    std::atomic<uint64_t> target{0};
    std::atomic<uint64_t> owner{0};
    // Who may raise it. 0: anyone; odd: one peer, twice its id and one; else the address of a sorted list of peers.
    std::atomic<uint64_t> raisers{0};
  };
  // Slots are backed by 1,024 at a time (32 KiB): an engine with a few requests touches one or two chunks.
  static constexpr uint32_t kChunkSlots = 1024;
  using Chunk = std::array<Slot, kChunkSlots>;

  Slot* find(uint32_t slot) const noexcept;

  std::array<std::atomic<Chunk*>, kSlots / kChunkSlots> chunks_{};
  std::array<std::unique_ptr<Chunk>, kSlots / kChunkSlots> storage_;  // guarded by mutex_
  std::atomic<uint32_t> allocated_{0};

  std::mutex mutex_;
  uint32_t fresh_ = 0;         // slots below were handed out at least once; guarded by mutex_
  std::deque<uint16_t> free_;  // released slots, oldest first; guarded by mutex_
};

}  // namespace kvc
