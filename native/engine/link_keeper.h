// LinkKeeper: makes a peer's links beyond the first one, and repairs broken links of peers that have others.
//
// Every method runs on the transfer thread. The states of a link are the same on both sides:
//
//   kUp -> kBroken   The link broke here, or the peer reported it. Nothing is posted on it any more. This side closes
//                    its end (Domain::fence), so that its count of landed pages is final. It then asks the peer to
//                    close its end and to report what landed there (kLinkLost). It asks over a working link, and
//                    repeatedly until the peer answers (kTallies). This side answers the same question once its own
//                    end is closed.
//          -> kOut   All parts are answered. The scheduler repeats the missing writes. A link that was never made
//                    begins in this state and rests until either side has something to post (kLinksWanted).
//          -> kOffered -> kProving   The side that connected the peer offers the link (kLinkOffer, kLinkAnswer), at
//                    growing intervals and without limit.
//          -> kUp    The peer's first message over the link (kLinkHello) arrived, so the link works.
//
// If no other link is up or being proved, or if the peer does not answer in time, the peer is down. Such a peer is
// handled like one with a single link.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/counter_sets.h"
#include "engine/link_message.h"
#include "engine/peer.h"
#include "engine/rewriter.h"
#include "engine/stats.h"
#include "engine/transfer_engine.h"
#include "engine/transfer_scheduler.h"

namespace kvc {

// State of a link that is made beside the first one, or has broken.
struct LinkRepair {
  using Clock = std::chrono::steady_clock;

  Error why;                  // why the link broke
  Clock::time_point began{};  // start of the present state
  Clock::time_point due{};    // time of the next action in this state

  // kBroken: the question and the answers so far. It has at least one part, so that the peer confirms that its end is
  // closed.
  bool asking = false;
  Clock::time_point ask_due{};  // time of the (next) question
  std::vector<Landed> landed;
  std::vector<bool> answered;          // one entry per part
  std::vector<LinkMessage> peer_asks;  // the peer's question, kept until this end is closed

  // kOffered, kProving, and kOut of the side that answers
  LinkId offered = 0;       // id of the new link, set when its making begins
  uint32_t last_epoch = 0;  // epoch of the last offer
  bool hello_said = false;
  bool hello_heard = false;

  std::chrono::milliseconds pause{};  // wait before the next offer
  bool was_up = false;                // whether the link has ever been up
  uint64_t times_lost = 0;            // how often it broke while it was up and the peer had other links
  Clock::time_point up_since{};
};

class LinkKeeper {
 public:
  using Clock = LinkRepair::Clock;

  // The DomainGroup, as far as the keeper needs it.
  class Owner {
   public:
    virtual ~Owner() = default;
    // Returns a new id under which domains report events of `link`.
    virtual LinkId new_link(Peer& peer, Link& link) = 0;
    virtual void forget_link(LinkId id) = 0;
    // Calls Domain::fence() and handles the events that the domain has reported.
    virtual bool fence(Domain& domain, LinkId id) = 0;
    // Fences a link that is no longer used, repeating the call as needed, and withdraws its offer.
    virtual void abandon_link(const Link& link, LinkId id) = 0;
    virtual void lose_peer(Peer& peer, Error error) = 0;  // calls forget() in turn

    // The three steps of making a link, on the control thread. They end in offered(), accepted() and completed() below.
    virtual void offer_link(Peer& peer, const Link& link, LinkId id) = 0;
    virtual void accept_link(Peer& peer, const Link& link, LinkId id, uint32_t epoch, Bytes offer) = 0;
    virtual void complete_link(Peer& peer, const Link& link, LinkId id, Bytes answer) = 0;
  };

  LinkKeeper(TransferScheduler& scheduler, const CounterSets& counters, Stats& stats, Owner& owner)
      : scheduler_(scheduler), counters_(counters), stats_(stats), owner_(owner) {}

  // --- Recorded only; step() acts on them.

  // Records that the link `id` (link.id, or the id of its offer) broke, or that its batches end with link errors. Only
  // the first report is recorded. One report per batch in flight may follow, and each would copy a full error.
  void broke(Peer& peer, Link& link, LinkId id, const Error& error);
  // True if broke() was recorded for this id.
  static bool noted(const Link& link, LinkId id) noexcept { return link.noted == id; }
  // Number of recorded failures that wait for step().
  size_t broken() const noexcept { return broken_.size(); }
  // A message of the peer with a tag of link_message.h, received over the link `id`.
  void receive(Peer& peer, LinkId id, std::span<const std::byte> message);

  // --- Results of the control thread for the link with this place and id. If a LinkEnd is not needed any more, it
  // stays with the caller.

  void offered(Peer& peer, size_t place, LinkId id, Result<Bytes> offer);
  void accepted(Peer& peer, size_t place, LinkId id, uint32_t epoch, Result<Connector::Accepted>& accepted);
  void completed(Peer& peer, size_t place, LinkId id, Result<std::unique_ptr<LinkEnd>>& end);

  // --- The turn of the transfer thread.

  bool step();
  // The time at which step() has work without any event.
  std::optional<Clock::time_point> next_step() const;
  // Appends the links of the peer that have been lost. Adds nothing for a peer that is down or ends.
  static void append_lost(const Peer& peer, const std::vector<std::string>& domains, std::vector<LostLink>& lost);
  // Makes the links of the peer that were not made yet, because they are needed now.
  void make_links(Peer& peer);
  // Ends the keeper's work for the links of this peer, which ends.
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
  // Null if the link at this place is no longer being made under this id.
  static Link* still_making(Peer& peer, size_t place, LinkId id);

  TransferScheduler& scheduler_;
  const CounterSets& counters_;
  Stats& stats_;
  Owner& owner_;

  std::vector<Broken> broken_;
  std::vector<Received> received_;
  std::vector<Repair> repairs_;  // links that are not up and need work
  std::vector<Peer*> wanting_;   // peers to which this side must report that it wants the other links
  Clock::time_point now_{};      // time of the current step()
};

}  // namespace kvc
