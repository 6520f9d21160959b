// LinkKeeper: makes the links of a peer beyond its first one, takes a broken link out of a peer that has others, settles
// with the peer what was on it, and brings it back.
//
// Every method runs on the worker thread. One link's way, the same on both sides:
//
//   kUp -> kBroken   it broke here, or the peer says that its end did. Nothing is posted on it any more. Our end is
//                    closed (Domain::fence), so what landed over it is counted for good; then the peer is asked to
//                    close its end and to tell what landed there (kLinkLost), over a link that works, again and again
//                    until it answers (kTallies). The same question of the peer's is answered once our end is closed.
//          -> kOut   all parts are answered: the scheduler writes again what is missing. A link that was not made yet
//                    begins here, and rests until either side has something to post (kLinksWanted).
//          -> kOffered -> kProving   the side that connected the peer offers the link (kLinkOffer, kLinkAnswer),
//                    at growing intervals, for as long as it takes.
//          -> kUp    with the peer's first message over it (kLinkHello): it carries.
//
// Where no other link is up or being proved, or the peer does not play its part in time, the peer is down as if it had
// one link only.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/counter_sets.h"
#include "engine/link_message.h"
#include "engine/peer.h"
#include "engine/rewriter.h"
#include "engine/stats.h"
#include "engine/transfer_scheduler.h"

namespace kvc {

// What a link needs that is made beside the first one, or has broken.
struct LinkRepair {
  using Clock = std::chrono::steady_clock;

  Error why;                  // it broke
  Clock::time_point began{};  // the present state
  Clock::time_point due{};    // the next thing to do in it

  // kBroken: the question, and what is answered of it. One part at least, so that the peer confirms its end.
  bool asking = false;
  Clock::time_point ask_due{};  // when it is asked (again)
  std::vector<Landed> landed;
  std::vector<bool> answered;          // by part
  std::vector<LinkMessage> peer_asks;  // the peer's question, until our end is closed

  // kOffered, kProving; and kOut of the side that answers
  LinkId offered = 0;       // the new link's id, from the moment that its making began
  uint32_t last_epoch = 0;  // of the offers made so far
  bool hello_said = false;
  bool hello_heard = false;

  std::chrono::milliseconds pause{};  // before the next offer
  bool was_up = false;                // ever
  Clock::time_point up_since{};
};

class LinkKeeper {
 public:
  using Clock = LinkRepair::Clock;

  // The group, as far as the keeper needs it.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual LinkId new_link(Peer& peer, Link& link) = 0;  // an id under which domains tell of `link` from now on
    virtual void forget_link(LinkId id) = 0;
    // Domain::fence, and what it has told is counted.
    virtual bool fence(Domain& domain, LinkId id) = 0;
    // Fences a link that is nobody's any more, in time, or withdraws its offer.
    virtual void abandon_link(const Link& link, LinkId id) = 0;
    virtual void lose_peer(Peer& peer, Error error) = 0;  // calls forget() in turn

    // The three steps of a link, on the control thread. Each ends in offered(), accepted() or completed() below.
    virtual void offer_link(Peer& peer, const Link& link, LinkId id) = 0;
    virtual void accept_link(Peer& peer, const Link& link, LinkId id, uint32_t epoch, Bytes offer) = 0;
    virtual void complete_link(Peer& peer, const Link& link, LinkId id, Bytes answer) = 0;
  };

  LinkKeeper(TransferScheduler& scheduler, const CounterSets& counters, Stats& stats, Owner& owner)
      : scheduler_(scheduler), counters_(counters), stats_(stats), owner_(owner) {}

  // --- Only noted, step() acts.

  // The link `id` (link.id, or what it is offered as) broke, or its batches end with errors that speak of the link. The first
  // such word is noted: as many as there were batches in flight may follow, and each makes a full error.
  void broke(Peer& peer, Link& link, LinkId id, const Error& error);
  // It was noted before.
  static bool noted(const Link& link, LinkId id) noexcept { return link.noted == id; }
  // Notes that wait for step().
  size_t broken() const noexcept { return broken_.size(); }
  // A message of the peer's with one of the tags of link_message.h, over the link `id`.
  void receive(Peer& peer, LinkId id, std::span<const std::byte> message);

  // --- What was done on the control thread for the link of this place and id. A link end that is of no use any more stays
  //     with the caller.

  void offered(Peer& peer, size_t place, LinkId id, Result<Bytes> offer);
  void accepted(Peer& peer, size_t place, LinkId id, uint32_t epoch, Result<Connector::Accepted>& accepted);
  void completed(Peer& peer, size_t place, LinkId id, Result<std::unique_ptr<LinkEnd>>& end);

  // --- The worker's turn.

  bool step();
  // When step() has something to do although nothing happened.
  std::optional<Clock::time_point> next_step() const;
  // There is use for the links of the peer that were not made yet.
  void make_links(Peer& peer);
  // The peer ends: its links are no longer the keeper's.
  void forget(Peer& peer);

 private:
  struct Broken {
    Peer* peer;
    Link* link;
    LinkId id;
    Error error;
  };
  struct Received {
    Peer* peer;
    LinkId id;
    Bytes bytes;
  };
  struct Repair {
    Peer* peer;
    Link* link;
  };

  void forgive_own_silence();
  void take_out(const Broken& broken);
  void watch(Peer& peer, Link& link);
  bool handle(const Received& received);
  void hear_lost(Peer& peer, Link& link, LinkMessage message);
  bool hear_tallies(Link& link, const LinkMessage& message);
  void hear_offer(Peer& peer, Link& link, LinkMessage message);
  void hear_answer(Peer& peer, Link& link, LinkMessage message);

  bool advance(Peer& peer, Link& link);
  bool close_and_ask(Peer& peer, Link& link);
  bool answer(Peer& peer, const Link& link, const LinkMessage& question);
  void settle(Peer& peer, Link& link);
  void offer(Peer& peer, Link& link);
  void withdraw(Link& link);
  void pause(Link& link);
  void renew(Link& link, LinkId id, uint32_t epoch);
  void prove(Peer& peer, Link& link);
  void enter(Link& link, Link::State state, Clock::duration wait);
  // Null: the link of this place is not being made under this id any more.
  static Link* still_making(Peer& peer, size_t place, LinkId id);

  TransferScheduler& scheduler_;
  const CounterSets& counters_;
  Stats& stats_;
  Owner& owner_;

  std::vector<Broken> broken_;
  std::vector<Received> received_;
  std::vector<Repair> repairs_;  // links that are not up, as far as there is something to do about them
  std::vector<Peer*> wanting_;   // peers that have to be told that we want the other links
  Clock::time_point now_{};      // of this step()
};

}  // namespace kvc
