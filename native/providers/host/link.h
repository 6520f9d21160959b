// Link: this process's end of the connection to one peer, with both of its directions.
//
// Sending: post() queues a batch. progress() writes it chunk by chunk straight into the peer's pages and then puts its
// immediate into the peer's ring. Receiving: receive() takes immediates out of this side's ring. The socket carries
// descriptors and wake-ups, and its end shows that the peer is gone.
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
#include "providers/same_host/connection.h"
#include "providers/same_host/link_base.h"

namespace kvc::host {

using same_host::BatchQueue;
using same_host::Connection;
using same_host::LinkContext;
using same_host::Mapping;
using same_host::Message;
using same_host::MessageKind;

// Bytes that one turn may write: 512 KiB. They take 35 us with memcpy (15 GB/s), 75 us with process_vm_writev at 64 KiB
// pages (7 GB/s) and at worst 170 us at 4 KiB pages (3 GB/s). A system call and the gate (2 us) are negligible beside
// that. This is also the longest stay inside a gate, for which a fence may wait.
constexpr uint64_t kChunkBytes = 512 << 10;
// A batch up to this size is written within post(). It costs a few microseconds there and saves a turn.
constexpr uint64_t kInlineBytes = 64 << 10;
// A batch's cost in a turn's budget, beside its bytes: about 1 us of system call and gate.
constexpr uint64_t kBatchCost = 8 << 10;
// A sleeping peer is notified of immediates when no more batches wait, or after this many bytes. 2 MiB take 150 us with
// memcpy and 300 us with process_vm_writev. A count can be late by that time while its link is busy.
constexpr uint64_t kAnnounceBytes = 2 << 20;
// Batches that may wait in a link. They are written one after the other, so the queue only has to bridge two turns.
constexpr uint32_t kQueueDepth = 64;

// Used on the domain's thread only. Nothing here blocks but the destructor, which closes and unmaps and therefore runs
// on the control thread.
class Link final : public same_host::LinkBase {
 public:
  // `ours` is the memory of the domain.
  Link(LinkId id, const std::shared_ptr<Connection>& connection, const LinkContext& context, const Memories& ours);

  // Admits the peer's writes. Call it once, before anything else.
  using LinkBase::begin;

  // --- Control messages.

  // Sends the next message about this side's memfds, if there is one and the socket takes it. Returns true if it did.
  bool tell();
  // Announces to the peer that the memfd of this name has no published region any more.
  void forget(uint32_t memory) { forgotten_.push_back(memory); }
  // Handles the end of the peer's process. Its socket may stay open in a child that it has forked.
  void process_ended();

  // --- Data path. Batches are written once the connection has the peer's board and the peer's domain has attached the
  // link.

  Posted post(const WriteBatch& batch);
  Posted send(WorkId work, std::span<const std::byte> message);
  void take(uint32_t slot) noexcept;
  // Writes until about `budget` bytes are written or no batch can proceed. Returns the budget it used.
  uint64_t progress(uint64_t budget);
  // Whether receive(), progress() or tell() would do something now.
  bool has_work() const noexcept;

  // --- The end.

  // Returns true once no write of the peer can land here over this link any more, and all that landed has been
  // reported. Notifies the peer, which may wait for the same. Call it after close().
  bool end();
  // gate() returns the peer's gate now. left_gate() returns whether the peer has left the gate that it was in when
  // `seen` was read.
  uint64_t gate() const noexcept { return in_.gate.load(std::memory_order_seq_cst); }
  bool left_gate(uint64_t seen) const;

 private:
  // The location of a batch's region: in a mapping of this process, or at an address of the peer's.
  struct Target {
    std::byte* mapped = nullptr;
    uint64_t address = 0;
  };
  enum class Step : uint8_t { kMoved, kBlocked, kFailed, kPeerGone };
  class Gate;

  bool handle(const Message& message, Connection::Descriptors& descriptors) override;
  void note_writes_at_close() noexcept override { gate_at_close_ = gate(); }
  bool say(const Message& message, std::span<const int> descriptors);
  bool has_to_tell() const noexcept { return told_ != ours_.last || !forgotten_.empty(); }

  Step advance(BatchQueue::Item& batch, uint64_t limit, Error& error);
  Step locate(const BatchQueue::Item& batch, Target& target, Error& error);
  Step copy_into(std::byte* region, BatchQueue::Item& batch, uint64_t limit);
  Step write_remote(uint64_t region, BatchQueue::Item& batch, uint64_t limit, Error& error);
  Step put_immediate(uint32_t immediate, Error& error);
  void announce_soon() noexcept;

  const Memories& ours_;
  const bool same_process_;
  Channel& in_;
  Channel& out_;

  // The peer knows all memfds of this side up to the name told_, except the forgotten ones.
  uint32_t told_ = 0;
  std::deque<uint32_t> forgotten_;

  std::unordered_map<uint32_t, Mapping> memories_;  // the peer's memfds by their name
  uint64_t gate_ = 0;         // private copy of out_'s gate, because the peer could scribble over the shared one
  uint64_t unannounced_ = 0;  // bytes written since the last notification of the peer
  bool awaiting_memory_ = false;

  uint64_t gate_at_close_ = 0;
};

}  // namespace kvc::host
