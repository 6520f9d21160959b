// MessageSlots: the messages of one link, both ways, each in a slot of shared memory until the receiver takes it.
//
// Everything here runs on the worker thread and never blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/domain.h"
#include "providers/same_host/channel.h"

namespace kvc::same_host {

class MessageSlots {
 public:
  // `sink` outlives the slots; it is told of messages that came over `link`.
  MessageSlots(LinkId link, DomainSink& sink) : link_(link), sink_(sink) {}

  // Once, before anything else; the memory behind both stays mapped for as long as the slots are used.
  void attach(const Direction& in, const Direction& out) noexcept {
    in_ = in;
    out_ = out;
  }

  // --- Sending

  // Copies a message of 1 to kMaxMessageBytes bytes into a free slot; false if there is none. The peer may be asleep.
  bool put(WorkId work, std::span<const std::byte> message) noexcept;
  // Completes the messages that the peer has taken; true if there was one. The sink may end the link from there.
  bool complete();

  // --- Receiving

  // Offers what has arrived to the sink, which may end the link from there, and lets the peer know what it took. After
  // kSome the peer may be asleep.
  Taken receive();
  // receive() or complete() would do something now. A message that the sink has refused is no work.
  bool has_work() const noexcept;

  // --- The end

  // Completes what the peer has not taken with `error`; nothing is received any more. Idempotent.
  void close(const Error& error);

 private:
  uint64_t waiting(std::memory_order order) const noexcept;
  uint64_t done() const noexcept;

  const LinkId link_;
  DomainSink& sink_;
  Direction in_;
  Direction out_;
  // Our own copies of the words that we write, because the peer could scribble over the shared ones. A bit a slot.
  uint64_t put_ = 0;                           // of out_
  uint64_t seen_ = 0;                          // the peer's messages_taken, as far as their sends were completed
  uint64_t taken_ = 0;                         // of in_
  uint64_t refused_ = 0;                       // of in_: the sink refused it when it was last asked
  std::array<WorkId, kMessageSlots> works_{};  // of out_, by slot
  bool closed_ = false;
};

}  // namespace kvc::same_host
