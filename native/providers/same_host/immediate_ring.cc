#include "providers/same_host/immediate_ring.h"

#include <algorithm>

namespace kvc::same_host {

namespace {

constexpr uint64_t kImmediatesPerTurn = 512;  // at 50 ns for a counter: 25 us

}  // namespace

ImmediateRing::Put ImmediateRing::put(uint32_t immediate) noexcept {
  if (tail_ - head_seen_ >= kRingEntries) {
    // `starved` is set before the last look at the head. Either the peer makes room afterwards and sees `starved`, or
    // this look sees the room.
    out_.starved->store(1, std::memory_order_seq_cst);
    head_seen_ = out_.receiver->head.load(std::memory_order_seq_cst);
    full_ = tail_ - head_seen_ >= kRingEntries;
    if (full_) return tail_ - head_seen_ == kRingEntries ? Put::kFull : Put::kOverwritten;
    out_.starved->store(0, std::memory_order_relaxed);
  }
  out_.sender->ring[tail_ % kRingEntries].store(immediate, std::memory_order_relaxed);
  handing_over();
  out_.sender->tail.store(++tail_, std::memory_order_seq_cst);
  return Put::kYes;
}

Taken ImmediateRing::receive() {
  const uint64_t arrived = in_.sender->tail.load(std::memory_order_acquire) - head_;
  if (arrived == 0) return Taken::kNothing;
  if (arrived > kRingEntries) return Taken::kOverwritten;
  hand_on(std::min(arrived, kImmediatesPerTurn));
  in_.receiver->head.store(head_, std::memory_order_seq_cst);
  return Taken::kSome;
}

void ImmediateRing::drain() {
  const uint64_t arrived = in_.sender->tail.load(std::memory_order_acquire) - head_;
  if (arrived <= kRingEntries) hand_on(arrived);
}

void ImmediateRing::hand_on(uint64_t immediates) {
  taking_over();
  for (const uint64_t end = head_ + immediates; head_ != end; ++head_) {
    completions_.immediate(link_, in_.sender->ring[head_ % kRingEntries].load(std::memory_order_relaxed));
  }
}

}  // namespace kvc::same_host
