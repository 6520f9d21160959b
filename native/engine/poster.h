// Poster: decides what is posted next, and over which link.
//
// One turn posts a quantum for each peer that has something to post: round robin over peers and, within a peer, over its
// streams, so that a huge request delays a small one by a few batches at most. Each batch takes the link that would be
// through with it first: the one with the fewest bytes in flight for its speed.
//
// Every method runs on the worker thread.
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
  // What the poster finds out about others.
  class Owner {
   public:
    virtual ~Owner() = default;
    // Nothing more of the stream can be posted.
    virtual void fail(Stream& stream, Error error) = 0;
    // A batch has more than one link to choose from, and the peer's other links were never made.
    virtual void wants_links(Peer& peer) = 0;
    // False: nothing of it may be posted any more (a recovery whose transfers were given up).
    virtual bool may_post(const Stream& stream) const = 0;
  };

  Poster(FlightTable& flights, Stats& stats, Owner& owner) : flights_(flights), stats_(stats), owner_(owner) {}

  // The stream has something to post. `first`: before the others of its peer.
  void make_runnable(Stream& stream, bool first = false);
  // The same, and unless something of the peer waits already, its turn is posted at once: of a scatter, the first member's
  // write does not wait until the last member has been looked at, and each member is in the cache once instead of twice.
  void start(Stream& stream);
  // It has nothing more to post.
  void remove(Stream& stream);
  // Nothing of any of its streams is posted any more.
  void forget(Peer& peer);

  // One turn; true if anything was posted.
  bool post();

  // Sends an internal message over `only`, or else over any link that is up. False: none takes it now. `goodbye`: it is
  // one, and its completion says whether it has arrived.
  bool send(Peer& peer, std::span<const std::byte> message, Link* only = nullptr, bool goodbye = false);

 private:
  enum class Outcome : uint8_t {
    kPosted,
    kBlocked,  // no link has room
    kWaits,    // no link has room for this (a message, a pinned write), where others may have for other things
    kNothing,
  };
  Outcome post_batch(Stream& stream);
  // A stream's quantum, from `posted` on, which it raises. kPosted: there is more.
  Outcome post_turn(Stream& stream, uint32_t& posted);
  bool post_peer(Peer& peer);
  // The link for a batch that takes `charge` of a window; null: none has room. `tried`: a bit for each that had none.
  static Link* pick_link(Peer& peer, const Request& request, bool message, uint64_t charge, uint32_t tried);
  static Link* choose_link(Peer& peer, const Request& request, bool message, uint64_t charge, uint32_t tried);
  static void split(const Peer& peer, Request& request);

  FlightTable& flights_;
  Stats& stats_;
  Owner& owner_;
  std::vector<Peer*> active_;  // peers with runnable streams
  // The batch that is posted. Kept: to clear it for each one takes a quarter of the instructions of posting a single write.
  std::array<PageWrite, Immediate::kMaxMultiplicity> pages_;
};

}  // namespace kvc
