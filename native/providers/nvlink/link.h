// Link: this process's end of the connection to one peer, and both of its directions.
//
// Sending: post() queues a batch, and the domain takes batches of all its links into one launch of the Copier: take(), and
// land() when the GPU has finished. Then the batch's immediate goes into the peer's ring. Receiving: receive() takes
// immediates and messages out of ours. The socket beside them carries wake-ups and what the two say of their memory, and
// its end tells that the peer is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "cuda/copy_queue.h"
#include "lane/domain.h"
#include "providers/nvlink/peer_regions.h"
#include "providers/nvlink/piece_sender.h"
#include "providers/nvlink/region.h"
#include "providers/nvlink/wire.h"
#include "providers/same_host/connection.h"
#include "providers/same_host/link_base.h"

namespace kvc::nvlink {

using same_host::BatchQueue;
using same_host::Connection;
using same_host::LinkContext;
using same_host::Message;
using same_host::MessageKind;

// Batches that wait in a link for a launch. With 64 pages each they fill one launch's list (Copier) twice.
constexpr uint32_t kQueueDepth = 128;

// What the connector has made of a link: the connection, and what the two ends have told each other over it.
struct Meeting final : LinkEnd {
  Meeting(std::unique_ptr<Connection> made, PeerRegions peers)
      : connection(std::move(made)), regions(std::move(peers)) {}
  // Lets go of the peer's memory, unless the domain has it now.
  ~Meeting() override;

  std::shared_ptr<Connection> connection;
  PeerRegions regions;
  PieceSender pieces;
  uint64_t told = 0;  // the region that `pieces` has been told of; 0: none
};

// A batch in a launch.
struct Flight {
  LinkId link = 0;
  WorkId work = 0;
  uint32_t immediate = 0;
  bool counted = false;
  std::optional<Error> error{};  // it was refused, and nothing of it copied
};
using Copies = cuda::CopyQueue<Flight>;

// The domain's thread; nothing here blocks but the end, which unmaps: the control thread's.
class Link final : public same_host::LinkBase {
 public:
  Link(LinkId id, Meeting& meeting, const LinkContext& context, const cuda::Driver& driver, const Copies& copies);
  // When no copy of ours is under way.
  ~Link();

  // Once, before anything else: lets the peer write, and tells it of `ours`, by place, that are in pieces.
  using Regions = std::map<uint32_t, Region*>;
  void begin(const Regions& ours);

  // --- Our memory

  // A region that was published just now. Of one in pieces the peer learns by and by; others are on the board.
  void tell(const Region& region);
  // The region at this place is revoked: what has to be waited for, and whether that is over.
  Region::User revoke(uint64_t key);
  bool has_left(const Region::User& user) const;

  // --- Control messages.

  // The peer's process is gone, perhaps without an end of the socket: a child that it has forked may hold it open.
  void process_ended();

  // --- Sending

  Posted post(const WriteBatch& batch);
  Posted send(WorkId work, std::span<const std::byte> message);
  // Not while immediates wait for the peer.
  bool can_launch() const noexcept {
    return !queue_.empty() && landed_.empty() && met() && !(waiting_ && still_waits());
  }
  const BatchQueue::Item& first() const noexcept { return queue_.front(); }
  // Moves the first batch into the launch that is gathered; nothing if it does not fit any more, or has to wait.
  std::optional<Flight> take(cuda::Copier& copier);
  // The GPU has finished it, or never will: counts it at the peer, as soon as the peer's ring has room, and completes it.
  // In the order of take().
  void land(Flight flight);

  // --- Receiving

  void take_message(uint32_t slot) noexcept;

  // --- Each turn

  // What is left over from other turns: immediates that waited for room, news of memory, the peer's wake-up; true if there
  // was any.
  bool flush();
  // receive(), flush() or a launch would do something now.
  bool has_work() const noexcept;

  // --- The end

  // After close(): true once no write of the peer can land here over this link any more, all that landed has been handed
  // on, and nothing of ours is under way. Then lets go of the peer's memory.
  bool end();
  // After end(): the peer has let go of ours, and the link is of no use any more. Looks at the peer's process and socket:
  // not for every turn.
  bool over();

 private:
  const Board& board() const noexcept { return connection_->board<Board>(); }
  bool handle(const Message& message, Connection::Descriptors& descriptors) override;
  void note_writes_at_close() noexcept override { entered_at_close_ = in_.entered.load(std::memory_order_seq_cst); }
  bool still_waits() const noexcept;
  std::optional<Error> refuse(const BatchQueue::Item& batch, const PeerRegion* region) const;
  bool settle_landed();
  bool peer_left(uint64_t entered) const noexcept;

  const cuda::Driver& driver_;
  const Copies& copies_;
  Channel& in_;
  Channel& out_;

  PeerRegions regions_;
  PieceSender pieces_;
  const uint64_t told_;  // a region that `pieces_` was told of by the connector; 0: none

  bool waiting_ = false;       // the first batch did, when it was last looked at
  std::deque<Flight> landed_;  // that have entered, and not left: the peer's ring was full
  // Our own copies of the words that we write, because the peer could scribble over the shared ones.
  uint64_t entered_ = 0;  // of out_
  uint64_t left_ = 0;     // of out_

  bool ended_ = false;
  bool gone_ = false;              // the peer is, or has never mapped anything
  uint64_t entered_at_close_ = 0;  // of in_
};

}  // namespace kvc::nvlink
