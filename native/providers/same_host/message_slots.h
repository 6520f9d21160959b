// MessageSlots: the messages of one link in both directions. Each lies in a slot of shared memory until the receiver's
// engine takes it.
//
// Used on the domain's thread only. Nothing here blocks.
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
  // The memory behind `in` and `out` stays mapped as long as the slots are used. `completions` outlives them and
  // receives the messages that arrive over `link`.
  MessageSlots(LinkId link, CompletionQueue& completions, const Direction& in, const Direction& out)
      : link_(link), completions_(completions), in_(in), out_(out) {}

  // --- Sending

  // Copies a message into a free slot. Returns false if no slot is free. The caller must wake a sleeping peer.
  bool put(WorkId work, std::span<const std::byte> message) noexcept;
  // Completes the messages that the peer has taken. Returns true if there was one.
  bool complete();

  // --- Receiving

  // Reports the arrived messages. Returns kOverwritten also if the peer reuses a slot that was not given back.
  Taken receive();
  // Records that the transfer engine has taken the message of this slot. The caller must wake a sleeping peer.
  void take(uint32_t slot) noexcept;

  // Whether receive() or complete() would do something now.
  bool has_work() const noexcept { return arrived(std::memory_order_seq_cst) != 0 || done() != 0; }

  // Completes with `error` the messages that the peer has not taken. Called when the link has ended.
  void fail(const Error& error);

 private:
  uint64_t arrived(std::memory_order order) const noexcept;
  uint64_t done() const noexcept;

  const LinkId link_;
  CompletionQueue& completions_;
  const Direction in_;
  const Direction out_;
  // A bit per slot. Private copies of the words that this side writes: the peer could scribble over the shared ones.
  SentMessages sent_;
  uint64_t put_ = 0;     // value of out_'s messages_put
  uint64_t taken_ = 0;   // value of in_'s messages_taken
  uint64_t handed_ = 0;  // of in_: reported, and not taken yet
};

}  // namespace kvc::same_host
