// Link: this process's end of the connection to one peer, and both of its directions.
//
// Sending: post() queues a batch, and the domain takes batches of all its links into one launch of the Copier: enter()
// before, leave() after it. Then the batch's immediate goes into the peer's ring. Receiving: receive() takes immediates
// and messages out of ours. The socket beside them carries wake-ups and the pieces of memory that has no IPC handle
// (pieces.h), and its end tells that the peer is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/domain.h"
#include "providers/nvlink/peer_memory.h"
#include "providers/nvlink/pieces.h"
#include "providers/nvlink/wire.h"
#include "providers/same_host/batch_queue.h"
#include "providers/same_host/connection.h"
#include "providers/same_host/immediate_ring.h"
#include "providers/same_host/message_slots.h"

namespace kvc::nvlink {

using same_host::BatchQueue;
using same_host::Connection;
using same_host::Mapping;
using same_host::Message;
using same_host::MessageKind;

// Batches that wait in a link for a launch. With 64 pages each they fill one launch's list (Copier) twice.
constexpr uint32_t kQueueDepth = 128;

class Link {
 public:
  // `sink` and the epoll descriptor are the domain's and outlive the link. The data of its events is its id.
  Link(LinkId id, DomainSink& sink, int epoll)
      : id_(id), sink_(sink), connection_(kLane, id, epoll), ring_(id, sink), messages_(id, sink) {}
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  ~Link();

  LinkId id() const noexcept { return id_; }

  // --- Set-up: the domain's, and attach(). Batches are written once the connection has met the peer.

  Connection& connection() noexcept { return connection_; }
  // `segment` is a mapping of a whole Segment. `same_process`: the peer's addresses are ours.
  Status attach(same_host::PeerSocket peer, Mapping segment, Connection::Role role, bool same_process);

  bool same_process() const noexcept { return same_process_; }
  bool attached() const noexcept { return in_ != nullptr; }
  bool met() const noexcept { return connection_.met(); }
  bool closed() const noexcept { return closed_.has_value(); }
  const Board& board() const noexcept { return connection_.board<Board>(); }

  // --- Control messages.

  void tell(const Message& message, int descriptor = -1);
  // The socket has something to say: reads a bounded number of messages. An Error is the end of the link.
  Status service();

  // --- Memory in pieces. One step takes some 100 us.

  // Tells the peer of our memory by and by, and of its end. Nothing where both are one process.
  void tell_memory(uint32_t memory, PieceSender::Pieces pieces);
  void forget_memory(uint32_t memory);
  // Sends the peer a piece, or maps one of the peer's for the context's GPU; true if it did. An Error is the end of the
  // link.
  bool send_piece(const cuda::Driver& driver);
  Result<bool> map_piece(const std::shared_ptr<cuda::Context>& context);
  bool has_piece_to_map() const noexcept { return !closed_ && pieces_in_.has_work(); }
  // The peer's memory of this name as far as it is here; null: nothing of it.
  const PieceReceiver::Memory* peer_memory(uint32_t memory) const noexcept { return pieces_in_.find(memory); }
  // Whether a region of the peer has pieces that are still to come.
  bool awaits(const RegionEntry& entry) const noexcept;
  // What the peer has forgotten, or after close() all there was. The copies that use it may still be under way.
  std::vector<std::shared_ptr<PeerAllocation>> take_unused() noexcept { return std::exchange(unused_, {}); }

  // --- Sending

  Posted post(const WriteBatch& batch);
  Posted send(WorkId work, std::span<const std::byte> message);
  BatchQueue& queue() noexcept { return queue_; }
  bool can_launch() const noexcept {
    return !closed_ && met() && !queue_.empty() && !(awaiting_ && awaits(queue_.front().rkey));
  }
  // The first batch's region is not mapped: it stays in the queue until the region's pieces are here. False: they are.
  bool must_wait() noexcept { return awaiting_ = awaits(queue_.front().rkey); }
  // The peer's regions as they are mapped here, by key.
  struct Target {
    cuda::DevicePointer base = 0;
    uint64_t bytes = 0;
    std::shared_ptr<PeerAllocation> mapping;  // null: a peer in this process
    uint32_t memory = 0;                      // its name, if it is in pieces
  };
  std::unordered_map<uint64_t, Target>& targets() noexcept { return targets_; }

  // A batch is about to be handed to the GPU: from here on it counts as landing. After this, ask revoked().
  void enter() noexcept { out_->entered.store(++entered_, std::memory_order_seq_cst); }
  bool revoked() const noexcept { return out_->revoked.load(std::memory_order_seq_cst) != 0; }
  // The oldest batch that entered has landed, or never will. In the order of enter().
  void leave() noexcept {
    same_host::handing_over();
    out_->left.store(++left_, std::memory_order_release);
  }
  // Batches that have entered and not left.
  bool flying() const noexcept { return entered_ != left_; }
  // Its pages are in place (before leave()): counts it at the peer, as soon as the peer's ring has room, and completes
  // it.
  void land(WorkId work, bool counted, uint32_t immediate);
  // Immediates that waited for room, messages and pieces that were taken, and the peer's wake-up; once a turn.
  bool flush();

  // --- Receiving

  // Hands a bounded number of arrived immediates and messages to the sink; true if there was one. An Error is the end of
  // the link.
  Result<bool> receive();
  // receive(), flush() or a launch would do something now.
  bool has_work() const noexcept;

  // --- The end

  // Revokes the peer's right to write and stops listening to it. Idempotent. What is queued, and what the GPU has, the
  // domain completes afterwards: fail_queued(), and the launches.
  void close(const Error& error);
  const Error& close_reason() const noexcept { return *closed_; }
  void fail_queued();
  // After close(): no write of the peer can land here over this link any more.
  bool fenced();
  // Batches of the peer that entered so far, and whether all those have landed (or never will).
  uint64_t peer_entered() const noexcept;
  bool peer_left(uint64_t entered) const;

 private:
  struct Uncounted {
    WorkId work;
    uint32_t immediate;
  };

  bool put_immediate(uint32_t immediate);
  bool awaits(uint64_t rkey) const noexcept;
  void forget_peer_memory(uint32_t memory);
  void set_aside(PieceReceiver::Memory memory);
  uint64_t pieces_taken() const noexcept;

  const LinkId id_;
  DomainSink& sink_;
  Connection connection_;
  Channel* in_ = nullptr;
  Channel* out_ = nullptr;
  same_host::ImmediateRing ring_;
  same_host::MessageSlots messages_;
  std::unordered_map<uint64_t, Target> targets_;
  bool same_process_ = false;
  PieceSender pieces_out_;
  PieceReceiver pieces_in_;
  std::vector<std::shared_ptr<PeerAllocation>> unused_;
  bool awaiting_ = false;  // the first batch did, when it was last looked at

  BatchQueue queue_{kQueueDepth};
  std::deque<Uncounted> uncounted_;  // landed, and the peer's ring was full
  // Our own copies of the words that we write, because the peer could scribble over the shared ones.
  uint64_t entered_ = 0;   // of out_
  uint64_t left_ = 0;      // of out_
  bool wake_due_ = false;  // there is something that a sleeping peer has not been told of

  std::optional<Error> closed_;
  bool fenced_ = false;
  uint64_t entered_at_close_ = 0;
};

}  // namespace kvc::nvlink
