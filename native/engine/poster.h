// Poster: decides what is posted next and over which link.
//
// One turn posts a quantum for each peer that has something to post. It takes peers in round robin, and the streams of
// a peer in round robin, so that a huge request delays a small one by a few batches at most. Each batch takes the link
// that would finish it first: the link with the fewest bytes in flight relative to its speed.
//
// Every method runs on the transfer thread.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/flight_table.h"
#include "engine/peer.h"
#include "engine/stats.h"
#include "engine/stream.h"
#include "lane/domain.h"
#include "lane/immediate.h"

namespace kvc {

class Poster {
 public:
  // Reports of the poster to its owner.
  class Owner {
   public:
    virtual ~Owner() = default;
    // Nothing more of the stream can be posted.
    virtual void fail(Stream& stream, Error error) = 0;
    // A batch could use more than one link, and the peer's other links were never made.
    virtual void wants_links(Peer& peer) = 0;
    // False if nothing of the stream may be posted any more (a recovery whose transfers were cancelled or failed).
    virtual bool may_post(const Stream& stream) const = 0;
  };

  Poster(FlightTable& flights, Stats& stats, Owner& owner) : flights_(flights), stats_(stats), owner_(owner) {}

  // Adds a stream that has something to post. `first`: before the other streams of its peer.
  void make_runnable(Stream& stream, bool first = false);
  // Like make_runnable(), but posts the stream's turn at once unless other work of the peer waits. In a scatter, the
  // first member's write then does not wait until the last member was processed. Each member is loaded into the cache
  // once instead of twice.
  void start(Stream& stream);
  // Removes a stream that has nothing more to post.
  void remove(Stream& stream);
  // Removes a peer: nothing of its streams is posted any more.
  void forget(Peer& peer);

  // Runs one turn. Returns true if anything was posted.
  bool post();

  // Sends an internal message over `only`, or over any link that is up if `only` is null. Returns false if no link
  // takes it now. `goodbye`: the message is a goodbye, and its completion reports whether it has arrived.
  bool send(Peer& peer, std::span<const std::byte> message, Link* only = nullptr, bool goodbye = false);

 private:
  enum class Outcome : uint8_t {
    kPosted,
    kBlocked,  // no link has room
    kWaits,    // no link has room for this request (a message, a pinned write), but may have room for others
    kNothing,
  };
  Outcome post_batch(Stream& stream);
  // Posts the quantum of a stream and raises `posted` for each batch. kPosted: more is left to post.
  Outcome post_turn(Stream& stream, uint32_t& posted);
  bool post_peer(Peer& peer);
  // The link for a batch that takes `charge` of a window; null if none has room. `tried`: one bit for each link that
  // had no room.
  static Link* pick_link(Peer& peer, const Request& request, bool message, uint64_t charge, uint32_t tried);
  static Link* choose_link(Peer& peer, const Request& request, bool message, uint64_t charge, uint32_t tried);
  static void split(const Peer& peer, Request& request);

  FlightTable& flights_;
  Stats& stats_;
  Owner& owner_;
  std::vector<Peer*> active_;  // peers with runnable streams
  // The pages of the batch that is posted. A member, because clearing it for each batch takes a quarter of the
  // instructions of posting a single write.
  std::array<PageWrite, Immediate::kMaxMultiplicity> pages_;
};

}  // namespace kvc
