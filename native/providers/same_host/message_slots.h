// MessageSlots: the messages of one link, both ways, each in a slot of shared memory until the receiver's engine takes it.
//
// Everything here runs on the domain's thread and never blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "lane/domain.h"
#include "lane/work_slots.h"
#include "providers/same_host/channel.h"

namespace kvc::same_host {

class MessageSlots {
 public:
  // The memory behind `in` and `out` stays mapped as long as the slots are used. `completions` outlives them, and is told
  // of messages that came over `link`.
  MessageSlots(LinkId link, CompletionQueue& completions, const Direction& in, const Direction& out)
      : link_(link), completions_(completions), in_(in), out_(out) {}

  // --- Sending

  // Copies a message into a free slot; false if there is none. The peer may be asleep.
  bool put(WorkId work, std::span<const std::byte> message) noexcept;
  // Completes the messages that the peer has taken; true if there was one.
  bool complete();

  // --- Receiving

  // Hands on what has arrived. kOverwritten also where the peer uses a slot again that was not given back.
  Taken receive();
  // The engine has the message of this slot. The peer may be asleep.
  void take(uint32_t slot) noexcept;

  // receive() or complete() would do something now.
  bool has_work() const noexcept { return arrived(std::memory_order_seq_cst) != 0 || done() != 0; }

  // The link has ended: completes what the peer has not taken with `error`.
  void fail(const Error& error);

 private:
  uint64_t arrived(std::memory_order order) const noexcept;
  uint64_t done() const noexcept;

  const LinkId link_;
  CompletionQueue& completions_;
  const Direction in_;
  const Direction out_;
  // A bit a slot. Our own copies of the words that we write, because the peer could scribble over the shared ones.
  SentMessages sent_;
  uint64_t put_ = 0;     // of out_
  uint64_t taken_ = 0;   // of in_
  uint64_t handed_ = 0;  // of in_: handed on, and not taken yet
};

}  // namespace kvc::same_host
