// DomainGroup: the peers of one transfer engine, the links to them, and the domains that carry the links.
//
// Every method runs on the transfer thread, and so does every domain or its proxy (domain_proxy.h). All domains of one
// provider form a lane. A peer is reached over exactly one lane. A peer has as many links as the side with more
// domains, so that each domain of both sides carries traffic. The handshake makes the first link. The LinkKeeper makes
// the others when there is something to write. If a link breaks while the peer has others, the LinkKeeper handles it.
// If the last link breaks, the peer is down.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/counter_sets.h"
#include "engine/event_queue.h"
#include "engine/lanes.h"
#include "engine/link_keeper.h"
#include "engine/memory_region.h"
#include "engine/message_pool.h"
#include "engine/offers.h"
#include "engine/peer.h"
#include "engine/peer_disconnects.h"
#include "engine/registry.h"
#include "engine/stats.h"
#include "engine/transfer_scheduler.h"
#include "lane/control_queue.h"
#include "lane/domain.h"

namespace kvc {

class DomainGroup final : private LinkKeeper::Owner {
 public:
  // Objects that several parts of a transfer engine share. All of them outlive the group.
  struct Shared {
    Lanes& lanes;
    Registry<Peer>& peers;
    Registry<Transfer>& transfers;
    Registry<LocalRegion>& regions;
    Registry<const RemoteRegion>& remote_regions;
    CounterSets& counters;
    EventQueue& events;
    MessagePool& messages;
    Stats& stats;
    ControlQueue& control;
    // Runs a function on the transfer thread; never blocks.
    std::function<void(std::function<void()>)> on_worker;
  };
  explicit DomainGroup(Shared shared);
  ~DomainGroup() override;

  // Takes the domains of the lanes, once these are open.
  void open();
  // Ends every peer and transfer, and the domains. Repeats the calls until all links are fenced and no peer's GPU maps
  // this process's memory any more, or until kCloseTimeout.
  void close();

  // --- Control operations. Calls named _step return false if they have to be repeated.

  // Connects the peer after its first link was made. `offerer`: this side made the offer. Returns false if fence() has
  // begun; the link's end then stays with the caller.
  bool connect(const std::shared_ptr<Peer>& peer, FirstLink& first, bool offerer);
  bool fence_step(Peer& peer, const Error& why);
  // Begins a graceful disconnect from the peer, if it has not begun (peer_disconnects.h).
  void leave(const std::shared_ptr<Peer>& peer) { disconnects_.leave(peer); }
  void publish(LocalMemory& memory);
  bool published(const LocalMemory& memory) const;
  bool withdraw_step(LocalMemory& memory);
  // Sets the receiver of messages. Empty: messages wait in the pool.
  void set_message_callback(MessageCallback callback) { message_callback_ = std::move(callback); }

  TransferScheduler& scheduler() { return scheduler_; }

  // --- The turn of the transfer thread: post, poll, settle. Returns true if anything happened.
  bool turn();
  // Returns false if there is work already.
  bool prepare_sleep();
  // The longest sleep without an event on a descriptor (links that wait for their fence or for a deadline). No value:
  // no limit.
  std::optional<std::chrono::milliseconds> longest_sleep() const;
  std::vector<int> fds() const;

 private:
  struct Place {
    Peer* peer = nullptr;
    Link* link = nullptr;
  };
  struct Ending {  // a link that no peer uses any more
    Domain* domain;
    LinkId link;
  };
  struct Untaken {  // a user's message for which the pool has no room
    Domain* domain;
    LinkId link;
    uint32_t slot;
    Bytes bytes;
  };

  // Handles the events of a domain.
  bool hear(Domain& domain);
  void count(LinkId link, uint32_t immediate);
  void hear_message(Domain& domain, LinkId link, uint32_t slot, Bytes& message);
  bool take_message(Peer& peer, std::span<const std::byte> message);
  void link_down(LinkId link, const Error& error);

  // LinkKeeper::Owner
  LinkId new_link(Peer& peer, Link& link) override;
  void forget_link(LinkId id) override;
  bool fence(Domain& domain, LinkId id) override;
  void abandon_link(const Link& link, LinkId id) override;
  void lose_peer(Peer& peer, Error error) override;
  void offer_link(Peer& peer, const Link& link, LinkId id) override;
  void accept_link(Peer& peer, const Link& link, LinkId id, uint32_t epoch, Bytes offer) override;
  void complete_link(Peer& peer, const Link& link, LinkId id, Bytes answer) override;

  Place find_link(LinkId id);
  static void weigh(Peer& peer, const Lane& lane);
  bool fence_links(Peer& peer);
  bool retry_endings();
  bool retry_untaken();
  bool deliver_messages();

  const Shared shared_;
  TransferScheduler scheduler_;
  LinkKeeper keeper_;
  PeerDisconnects disconnects_;
  MessageCallback message_callback_;

  std::vector<Domain*> domains_;             // of all lanes
  std::unordered_map<LinkId, Place> links_;  // of connected peers
  // The latest entries of links_, by the low bits of the id. Each immediate looks up its link, and the hash table would
  // be most of its cost.
  struct Recent {
    LinkId id = 0;
    Place place;
  };
  std::array<Recent, 64> recent_{};
  std::vector<Ending> endings_;
  std::vector<std::shared_ptr<Peer>> falling_;  // peers that are down and have links that are not fenced
  std::deque<Untaken> untaken_;                 // oldest first
};

}  // namespace kvc
