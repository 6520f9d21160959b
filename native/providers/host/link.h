// Link: this process's end of the connection to one peer, and both of its directions.
//
// Sending: post() queues a batch, progress() writes it chunk by chunk straight into the peer's pages and then puts
// its immediate into the peer's ring. Receiving: receive() takes immediates out of ours. The socket beside them
// carries descriptors and wake-ups, and its end tells that the peer is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>

#include "lane/domain.h"
#include "providers/host/memory.h"
#include "providers/host/wire.h"
#include "providers/same_host/batch_queue.h"
#include "providers/same_host/connection.h"
#include "providers/same_host/immediate_ring.h"
#include "providers/same_host/link_events.h"
#include "providers/same_host/message_slots.h"

namespace kvc::host {

using same_host::BatchQueue;
using same_host::Connection;
using same_host::Mapping;
using same_host::Message;
using same_host::MessageKind;

// What one turn may write before others have theirs: 512 KiB take 35 us with memcpy (15 GB/s), 75 us
// with process_vm_writev at 64 KiB pages (7 GB/s) and at worst 170 us at 4 KiB pages (3 GB/s), beside which a
// system call and the gate (2 us) do not count. Also the longest stay inside a gate, which a fence may wait for.
constexpr uint64_t kChunkBytes = 512 << 10;
// A batch up to this size is written within post(), where it costs a few microseconds and saves a turn.
constexpr uint64_t kInlineBytes = 64 << 10;
// What a batch costs in a turn's budget beside its bytes: about 1 us of system call and gate.
constexpr uint64_t kBatchCost = 8 << 10;
// A peer that sleeps is told of immediates when nothing more waits behind them, or after this much: 2 MiB take 150 us
// with memcpy and 300 us with process_vm_writev, by which a count can be late while its link is busy.
constexpr uint64_t kAnnounceBytes = 2 << 20;
// Batches that wait in a link. They are written one after the other, so this only has to bridge two turns.
constexpr uint32_t kQueueDepth = 64;

// What all links of a domain share. It need not be there any more when a link ends.
struct LinkContext {
  const Memories& memories;
  same_host::LinkEvents& events;
  CompletionQueue& completions;
  ControlQueue& control;
};

// The domain's thread; nothing here blocks but the end, which closes and unmaps: the control thread's.
class Link {
 public:
  Link(LinkId id, std::unique_ptr<Connection> connection, const LinkContext& context);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Once, before anything else: lets the peer write.
  void begin();

  // --- Control messages.

  // Sends the next message about our memfds, if there is one and the socket takes it; true if it did.
  bool tell();
  // The memfd of this name has no published region any more.
  void forget(uint32_t memory) { forgotten_.push_back(memory); }
  // The socket has something to say, or takes something again: reads a bounded number of messages, and returns how many.
  uint32_t service();
  // The peer's process is gone, perhaps without an end of the socket: a child that it has forked may hold it open.
  void process_ended();

  // --- Data path. Batches are written once the connection has met the peer, and the peer's domain has the link.

  Posted post(const WriteBatch& batch);
  Posted send(WorkId work, std::span<const std::byte> message);
  void take(uint32_t slot) noexcept;
  // Writes until about `budget` bytes are written or there is nothing to do; returns what it spent.
  uint64_t progress(uint64_t budget);
  // Hands on a bounded number of arrived immediates and messages, and completes the messages that the peer has taken;
  // true if there was one.
  bool receive();
  // receive(), progress() or tell() would do something now.
  bool has_work() const noexcept;

  // --- The end.

  // Completes what is queued with `error`, revokes the peer's right to write and stops listening to it. Idempotent.
  void close(const Error& error);
  // After close(): true once no write of the peer can land here over this link any more, and all that landed has been
  // handed on. Tells the peer, which may have to know the same of us.
  bool end();
  // The peer's gate now, and whether the peer has left the one it was in when `seen` was read.
  uint64_t gate() const noexcept { return in_.gate.load(std::memory_order_seq_cst); }
  bool left_gate(uint64_t seen) const;

 private:
  // Where a batch's region lies: in a mapping of ours, or at an address of the peer's.
  struct Target {
    std::byte* mapped = nullptr;
    uint64_t address = 0;
  };
  enum class Step : uint8_t { kMoved, kBlocked, kFailed, kPeerGone };
  class Gate;

  bool handle(const Message& message, Connection::Descriptors& descriptors);
  bool say(const Message& message, std::span<const int> descriptors);
  bool has_to_tell() const noexcept { return told_ != context_.memories.last || !forgotten_.empty(); }
  void lose_peer(const Error& error);
  void break_down(const Error& error);

  Step advance(BatchQueue::Item& batch, uint64_t limit, Error& error);
  Step locate(const BatchQueue::Item& batch, Target& target, Error& error);
  Step copy_into(std::byte* region, BatchQueue::Item& batch, uint64_t limit);
  Step write_remote(uint64_t region, BatchQueue::Item& batch, uint64_t limit, Error& error);
  Step put_immediate(uint32_t immediate, Error& error);
  void announce_soon() noexcept;

  const LinkId id_;
  const LinkContext context_;
  const std::unique_ptr<Connection> connection_;
  const bool same_process_;
  Channel& in_;
  Channel& out_;
  same_host::ImmediateRing ring_;
  same_host::MessageSlots messages_;

  // What the peer has been told of our memfds: all up to this name, but for those forgotten.
  uint32_t told_ = 0;
  std::deque<uint32_t> forgotten_;
  bool socket_full_ = false;

  std::unordered_map<uint32_t, Mapping> memories_;  // the peer's memfds by their name
  BatchQueue queue_{kQueueDepth};
  uint64_t gate_ = 0;         // of out_: our own copy, because the peer could scribble over the shared one
  bool wake_due_ = false;     // there is something that a sleeping peer has not been told of
  uint64_t unannounced_ = 0;  // bytes written since the peer was last told
  bool awaiting_memory_ = false;

  bool closed_ = false;
  uint64_t gate_at_close_ = 0;
};

}  // namespace kvc::host
