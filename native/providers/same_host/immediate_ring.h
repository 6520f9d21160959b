// ImmediateRing: the immediates of one link, both ways, in memory that both processes map.
//
// Everything here runs on the worker thread and never blocks.
#pragma once

#include <atomic>
#include <cstdint>

#include "engine/domain.h"
#include "providers/same_host/channel.h"

namespace kvc::same_host {

class ImmediateRing {
 public:
  // `sink` outlives the ring; it is told of immediates that came over `link`.
  ImmediateRing(LinkId link, DomainSink& sink) : link_(link), sink_(sink) {}

  // Once, before anything else; the memory behind both stays mapped for as long as the ring is used.
  void attach(const Direction& in, const Direction& out) noexcept {
    in_ = in;
    out_ = out;
  }

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

  // Hands a bounded number of arrived immediates to the sink, which may end the link from there: close() ends the loop.
  Taken receive();
  // After receive(): the peer waits for the room it has made, and wants to be woken.
  bool starves_peer() const noexcept { return in_.starved->load(std::memory_order_seq_cst) != 0; }
  bool has_arrivals() const noexcept { return in_.sender->tail.load(std::memory_order_seq_cst) != head_; }

  // --- The end

  // Nothing is received any more, except by drain().
  void close() noexcept { closed_ = true; }
  // Once no write of the peer can land any more: hands all that is left to the sink. It was put there before the end,
  // so it counts; the peer may have completed it already.
  void drain();

 private:
  const LinkId link_;
  DomainSink& sink_;
  Direction in_;
  Direction out_;
  // Our own copies of the words that we write, because the peer could scribble over the shared ones.
  uint64_t tail_ = 0;       // of out_
  uint64_t head_ = 0;       // of in_
  uint64_t head_seen_ = 0;  // the peer's head when we last looked: less traffic on its cache line
  bool full_ = false;       // the last put() found no room
  bool closed_ = false;
};

}  // namespace kvc::same_host
