// ImmediateRing: the immediates of one link, both ways, in memory that both processes map.
//
// Everything here runs on the domain's thread and never blocks.
#pragma once

#include <atomic>
#include <cstdint>

#include "lane/domain.h"
#include "providers/same_host/channel.h"

namespace kvc::same_host {

class ImmediateRing {
 public:
  // The memory behind `in` and `out` stays mapped as long as the ring is used. `completions` outlives it, and is told of
  // immediates that came over `link`.
  ImmediateRing(LinkId link, CompletionQueue& completions, const Direction& in, const Direction& out)
      : link_(link), completions_(completions), in_(in), out_(out) {}

  // --- Sending

  enum class Put : uint8_t {
    kYes,
    kFull,        // the peer wakes this domain when it has made room
    kOverwritten  // the peer has scribbled over its head
  };
  // Call it once the pages of `immediate` are in place: the peer counts them from now on.
  Put put(uint32_t immediate) noexcept;
  // False as long as the peer has not touched its head since put() found no room: trying again is of no use.
  bool may_have_room() const noexcept {
    return !full_ || out_.receiver->head.load(std::memory_order_seq_cst) != head_seen_;
  }

  // --- Receiving

  // Hands on a bounded number of arrived immediates.
  Taken receive();
  // After receive(): the peer waits for the room it has made, and wants to be woken.
  bool starves_peer() const noexcept { return in_.starved->load(std::memory_order_seq_cst) != 0; }
  bool has_arrivals() const noexcept { return in_.sender->tail.load(std::memory_order_seq_cst) != head_; }

  // Once no write of the peer can land any more: hands on all that is left. It was put there before the end, so it
  // counts; the peer may have completed it already.
  void drain();

 private:
  void hand_on(uint64_t immediates);

  const LinkId link_;
  CompletionQueue& completions_;
  const Direction in_;
  const Direction out_;
  // Our own copies of the words that we write, because the peer could scribble over the shared ones.
  uint64_t tail_ = 0;       // of out_
  uint64_t head_ = 0;       // of in_
  uint64_t head_seen_ = 0;  // the peer's head when we last looked: less traffic on its cache line
  bool full_ = false;       // the last put() found no room
};

}  // namespace kvc::same_host
