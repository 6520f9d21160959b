#include "engine/imm_counter.h"

#include <algorithm>

namespace kvc {

namespace {

constexpr uint32_t kTagShift = 53;
constexpr uint64_t kLive = uint64_t{1} << 63;
constexpr uint64_t kGenerationMask = (uint64_t{1} << Immediate::kGenerationBits) - 1;

constexpr uint64_t tag(uint32_t generation) noexcept { return kLive | (uint64_t{generation} << kTagShift); }
constexpr bool same_tag(uint64_t a, uint64_t b) noexcept { return ((a ^ b) >> kTagShift) == 0; }
constexpr uint32_t generation_of(uint64_t word) noexcept {
  return static_cast<uint32_t>((word >> kTagShift) & kGenerationMask);
}

// Whether `peer` is among the `raisers` of a slot.
bool may_raise(uint64_t raisers, PeerId peer) noexcept {
  if (raisers == 0) return true;
  if (raisers % 2 == 1) return raisers / 2 == peer;
  const auto& several = *reinterpret_cast<const std::vector<PeerId>*>(raisers);
  return std::binary_search(several.begin(), several.end(), peer);
}

}  // namespace

ImmCounterTable::Slot* ImmCounterTable::find(uint32_t slot) const noexcept {
  Chunk* chunk = chunks_[slot / kChunkSlots].load(std::memory_order_acquire);
  return chunk == nullptr ? nullptr : &(*chunk)[slot % kChunkSlots];
}

bool ImmCounterTable::allocate(uint32_t n, uint64_t owner, const std::vector<PeerId>& raisers,
                               std::vector<uint32_t>& immediates) {
  static_assert(alignof(std::vector<PeerId>) % 2 == 0);
  const uint64_t who = raisers.empty()       ? 0
                       : raisers.size() == 1 ? uint64_t{raisers.front()} * 2 + 1
                                             : reinterpret_cast<uint64_t>(&raisers);
  const std::lock_guard lock(mutex_);
  if (n > free_.size() + (kSlots - fresh_)) return false;
  immediates.reserve(immediates.size() + n);
  for (uint32_t i = 0; i < n; ++i) {
    uint32_t index = fresh_;
    if (fresh_ < kSlots) {
      if (index % kChunkSlots == 0) {
        auto& chunk = storage_[index / kChunkSlots];
        chunk = std::make_unique<Chunk>();
        chunks_[index / kChunkSlots].store(chunk.get(), std::memory_order_release);
      }
      ++fresh_;
    } else {
      index = free_.front();
      free_.pop_front();
    }
    Slot& slot = *find(index);
    const uint32_t generation = generation_of(slot.word.load(std::memory_order_relaxed));
    slot.owner.store(owner, std::memory_order_seq_cst);
    slot.raisers.store(who, std::memory_order_seq_cst);
    slot.word.store(tag(generation), std::memory_order_seq_cst);  // live, count 0
    immediates.push_back(Immediate{index, generation, 1}.encode());
  }
  allocated_.fetch_add(n, std::memory_order_relaxed);
  return true;
}

void ImmCounterTable::release(uint32_t immediate) {
  const Immediate imm = Immediate::decode(immediate);
  const std::lock_guard lock(mutex_);
  Slot* slot = find(imm.slot);
  if (slot == nullptr || !same_tag(slot->word.load(std::memory_order_seq_cst), tag(imm.generation))) return;
  // The target is removed first. Otherwise an add() that takes the target after this point would report a released set.
  slot->target.store(0, std::memory_order_seq_cst);
  const uint64_t next = (uint64_t{imm.generation} + 1) & kGenerationMask;
  slot->word.store(next << kTagShift, std::memory_order_seq_cst);  // not live
  free_.push_back(static_cast<uint16_t>(imm.slot));
  allocated_.fetch_sub(1, std::memory_order_relaxed);
}

ImmCounterTable::Added ImmCounterTable::add(uint32_t immediate, PeerId peer) noexcept {
  const Immediate imm = Immediate::decode(immediate);
  Slot* slot = find(imm.slot);
  if (slot == nullptr) return {.stale = true};
  const uint64_t expected_tag = tag(imm.generation);
  uint64_t word = slot->word.load(std::memory_order_acquire);
  do {
    if (!same_tag(word, expected_tag)) return {.stale = true};
    if (!may_raise(slot->raisers.load(std::memory_order_acquire), peer)) {
      // Or the slot has a new owner since the word was read, and these are the new owner's raisers.
      const bool same = same_tag(slot->word.load(std::memory_order_seq_cst), expected_tag);
      return {.stale = !same, .foreign = same};
    }
  } while (!slot->word.compare_exchange_weak(word, word + imm.multiplicity, std::memory_order_seq_cst,
                                             std::memory_order_acquire));
  // expect() stores the target and then reads the count. This code does the opposite, so one of the two sees the other.
  // The side that takes the target away (compare_exchange) reports it. The owner is read before that: as long as the
  // target has our generation, the slot has not changed owner.
  uint64_t target = slot->target.load(std::memory_order_seq_cst);
  if (!same_tag(target, expected_tag)) return {};
  if (((word + imm.multiplicity) & kMaxCount) < (target & kMaxCount)) return {};
  const uint64_t owner = slot->owner.load(std::memory_order_seq_cst);
  if (!slot->target.compare_exchange_strong(target, 0, std::memory_order_seq_cst)) return {};
  return {.reached = true, .owner = owner};
}

bool ImmCounterTable::expect(uint32_t immediate, uint64_t target) noexcept {
  const Immediate imm = Immediate::decode(immediate);
  Slot* slot = find(imm.slot);
  if (slot == nullptr) return false;
  uint64_t armed = tag(imm.generation) | target;
  slot->target.store(armed, std::memory_order_seq_cst);
  const uint64_t word = slot->word.load(std::memory_order_seq_cst);
  if (!same_tag(word, armed) || (word & kMaxCount) < target) return false;
  return slot->target.compare_exchange_strong(armed, 0, std::memory_order_seq_cst);
}

std::optional<uint64_t> ImmCounterTable::value(uint32_t immediate) const noexcept {
  const Immediate imm = Immediate::decode(immediate);
  const Slot* slot = find(imm.slot);
  if (slot == nullptr) return std::nullopt;
  const uint64_t word = slot->word.load(std::memory_order_acquire);
  if (!same_tag(word, tag(imm.generation))) return std::nullopt;
  return word & kMaxCount;
}

std::optional<uint64_t> ImmCounterTable::owner(uint32_t immediate) const noexcept {
  const Immediate imm = Immediate::decode(immediate);
  const Slot* slot = find(imm.slot);
  if (slot == nullptr) return std::nullopt;
  const uint64_t owner = slot->owner.load(std::memory_order_seq_cst);
  // Read last: as long as it has our generation, the slot has not changed owner.
  if (!same_tag(slot->word.load(std::memory_order_seq_cst), tag(imm.generation))) return std::nullopt;
  return owner;
}

}  // namespace kvc
