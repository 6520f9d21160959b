// Link: this process's end of the connection to one peer, with both of its directions.
//
// Sending: post() queues a batch. The domain collects batches of all its links into one launch of the Copier: it calls
// take(), and land() when the GPU has finished. Then the batch's immediate goes into the peer's ring. Receiving:
// receive() takes immediates and messages out of this side's ring. The socket carries wake-ups and the messages about
// memory, and its end shows that the peer is gone.
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

// Batches that may wait in a link for a launch. With 64 pages each they fill one launch's list (Copier) twice.
constexpr uint32_t kQueueDepth = 128;

// The connector's part of a link: the connection, and the state that both ends have exchanged over it.
struct Meeting final : LinkEnd {
  Meeting(std::unique_ptr<Connection> made, PeerRegions peers)
      : connection(std::move(made)), regions(std::move(peers)) {}
  // Unmaps the peer's memory, unless the domain has taken it over.
  ~Meeting() override;

  std::shared_ptr<Connection> connection;
  PeerRegions regions;
  PieceSender pieces;
  uint64_t told = 0;  // the region whose pieces `pieces` announces; 0: none
};

// A batch in a launch.
struct Flight {
  LinkId link = 0;
  WorkId work = 0;
  uint32_t immediate = 0;
  bool counted = false;
  std::optional<Error> error{};  // set if the batch was refused, and none of it copied
};
using Copies = cuda::CopyQueue<Flight>;

// Used on the domain's thread only. Nothing here blocks but the destructor, which unmaps and therefore runs on the
// control thread.
class Link final : public same_host::LinkBase {
 public:
  Link(LinkId id, Meeting& meeting, const LinkContext& context, const cuda::Driver& driver, const Copies& copies);
  // Must run when no copy of this side is in flight.
  ~Link();

  // Admits the peer's writes and announces the regions of `ours` (by place) that are in pieces. Call it once, before
  // anything else.
  using Regions = std::map<uint32_t, Region*>;
  void begin(const Regions& ours);

  // --- Our memory

  // Announces a region that was just published, if it is in pieces; the peer receives them over the next turns. Other
  // regions are on the board.
  void tell(const Region& region);
  // revoke() returns what to wait for after the region of this key was revoked. has_left() returns whether that wait is
  // over.
  Region::User revoke(uint64_t key);
  bool has_left(const Region::User& user) const;

  // --- Control messages.

  // Handles the end of the peer's process. Its socket may stay open in a child that it has forked.
  void process_ended();

  // --- Sending

  Posted post(const WriteBatch& batch);
  Posted send(WorkId work, std::span<const std::byte> message);
  // Whether the first batch may be launched. False while immediates wait for room at the peer.
  bool can_launch() const noexcept {
    return !queue_.empty() && landed_.empty() && met() && !(waiting_ && still_waits());
  }
  const BatchQueue::Item& first() const noexcept { return queue_.front(); }
  // Moves the first batch into the launch that is being gathered. Returns nothing if the batch does not fit any more,
  // or has to wait.
  std::optional<Flight> take(cuda::Copier& copier);
  // Ends a batch that the GPU has finished or never will: counts it at the peer, as soon as the peer's ring has room,
  // and completes it. Call it in the order of take().
  void land(Flight flight);

  // --- Receiving

  void take_message(uint32_t slot) noexcept;

  // --- Each turn

  // Does the work left over from other turns: immediates that waited for room, messages about memory, the peer's
  // wake-up. Returns true if there was any.
  bool flush();
  // Whether receive(), flush() or a launch would do something now.
  bool has_work() const noexcept;

  // --- The end

  // Returns true once no write of the peer can land here over this link any more. By then all that landed has been
  // reported, and no copy of this side is in flight. Also unmaps the peer's memory. Call it after close().
  bool end();
  // Returns true once the peer has unmapped our memory, so that the link can be destroyed. Call it after end(). It
  // looks at the peer's process and socket, so it is too slow for every turn.
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
  const uint64_t told_;  // a region that the connector passed to `pieces_`; 0: none

  bool waiting_ = false;       // the first batch had to wait when it was last looked at
  std::deque<Flight> landed_;  // entered and not left, because the peer's ring was full
  // Private copies of the words that this side writes: the peer could scribble over the shared ones.
  uint64_t entered_ = 0;  // value of out_'s entered
  uint64_t left_ = 0;     // value of out_'s left

  bool ended_ = false;
  bool gone_ = false;              // the peer is gone, or has never mapped anything
  uint64_t entered_at_close_ = 0;  // value of in_'s entered when the link was closed
};

}  // namespace kvc::nvlink
