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
#include "providers/same_host/connection.h"
#include "providers/same_host/link_base.h"

namespace kvc::host {

using same_host::BatchQueue;
using same_host::Connection;
using same_host::LinkContext;
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

// The domain's thread; nothing here blocks but the end, which closes and unmaps: the control thread's.
class Link final : public same_host::LinkBase {
 public:
  // `ours`: the memory of the domain.
  Link(LinkId id, const std::shared_ptr<Connection>& connection, const LinkContext& context, const Memories& ours);

  // Once, before anything else: lets the peer write.
  using LinkBase::begin;

  // --- Control messages.

  // Sends the next message about our memfds, if there is one and the socket takes it; true if it did.
  bool tell();
  // The memfd of this name has no published region any more.
  void forget(uint32_t memory) { forgotten_.push_back(memory); }
  // The peer's process is gone, perhaps without an end of the socket: a child that it has forked may hold it open.
  void process_ended();

  // --- Data path. Batches are written once the connection has met the peer, and the peer's domain has the link.

  Posted post(const WriteBatch& batch);
  Posted send(WorkId work, std::span<const std::byte> message);
  void take(uint32_t slot) noexcept;
  // Writes until about `budget` bytes are written or there is nothing to do; returns what it spent.
  uint64_t progress(uint64_t budget);
  // receive(), progress() or tell() would do something now.
  bool has_work() const noexcept;

  // --- The end.

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

  // What the peer has been told of our memfds: all up to this name, but for those forgotten.
  uint32_t told_ = 0;
  std::deque<uint32_t> forgotten_;

  std::unordered_map<uint32_t, Mapping> memories_;  // the peer's memfds by their name
  uint64_t gate_ = 0;         // of out_: our own copy, because the peer could scribble over the shared one
  uint64_t unannounced_ = 0;  // bytes written since the peer was last told
  bool awaiting_memory_ = false;

  uint64_t gate_at_close_ = 0;
};

}  // namespace kvc::host
