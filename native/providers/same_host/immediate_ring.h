// ImmediateRing: the immediates of one link in both directions, in memory that both processes map.
//
// Used on the domain's thread only. Nothing here blocks.
#pragma once

#include <atomic>
#include <cstdint>

#include "lane/domain.h"
#include "providers/same_host/channel.h"

namespace kvc::same_host {

class ImmediateRing {
 public:
  // The memory behind `in` and `out` stays mapped as long as the ring is used. `completions` outlives the ring and
  // receives the immediates that arrive over `link`.
  ImmediateRing(LinkId link, CompletionQueue& completions, const Direction& in, const Direction& out)
      : link_(link), completions_(completions), in_(in), out_(out) {}

  // --- Sending

  enum class Put : uint8_t {
    kYes,
    kFull,        // the peer wakes this domain once there is room
    kOverwritten  // the peer has overwritten its head with nonsense
  };
  // Puts `immediate` into the ring. Call it once its pages are in place: the peer counts them from now on.
  Put put(uint32_t immediate) noexcept;
  // Whether put() may succeed. False until the peer has changed its head after a put() that found no room.
  bool may_have_room() const noexcept {
    return !full_ || out_.receiver->head.load(std::memory_order_seq_cst) != head_seen_;
  }

  // --- Receiving

  // Reports a bounded number of arrived immediates.
  Taken receive();
  // Whether the peer waits for the room that receive() has made, and must be woken. Call it after receive().
  bool starves_peer() const noexcept { return in_.starved->load(std::memory_order_seq_cst) != 0; }
  bool has_arrivals() const noexcept { return in_.sender->tail.load(std::memory_order_seq_cst) != head_; }

  // Reports all immediates that are left. Call it once no write of the peer can land any more. They count because they
  // were put before the end; the peer may have completed them already.
  void drain();

 private:
  void hand_on(uint64_t immediates);

  const LinkId link_;
  CompletionQueue& completions_;
  const Direction in_;
  const Direction out_;
  // Private copies of the words that this side writes. The peer could scribble over the shared ones.
  uint64_t tail_ = 0;       // value of out_'s tail
  uint64_t head_ = 0;       // value of in_'s head
  uint64_t head_seen_ = 0;  // the peer's head at the last look, kept to spare traffic on its cache line
  bool full_ = false;       // the last put() found no room
};

}  // namespace kvc::same_host
