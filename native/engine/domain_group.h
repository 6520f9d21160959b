// DomainGroup: the peers of one engine, the links to them, and the domains that carry these.
//
// Every method runs on the worker thread, and so does every domain, or its proxy (domain_proxy.h). All domains of one
// provider form a lane; a peer is reached over exactly one lane. It has max(own, its) links, so that each domain of either
// side carries traffic also where the two sides have different numbers of them: the first one from the handshake, the others
// from the LinkKeeper once there is something to write. A link that breaks while the peer has others is the LinkKeeper's;
// with its last one the peer is down.
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
  // What several parts of an engine share. All of it outlives the group.
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
    // Has the worker run something; never blocks.
    std::function<void(std::function<void()>)> on_worker;
  };
  explicit DomainGroup(Shared shared);
  ~DomainGroup() override;

  // Once the lanes are open.
  void open();
  // Ends every peer and transfer, and the domains. Keeps calling them until all links are fenced and no peer's GPU
  // maps our memory any more, or kCloseTimeout.
  void close();

  // --- Control operations. Those that end in _step may have to be called again: until true.

  // The peer's first link is made: it is connected. `offerer`: this side has offered. False: fence() has begun, and the
  // link's end stays with the caller.
  bool connect(const std::shared_ptr<Peer>& peer, FirstLink& first, bool offerer);
  bool fence_step(Peer& peer, const Error& why);
  // Begins to part from the peer in good order, if that has not begun (peer_disconnects.h).
  void leave(const std::shared_ptr<Peer>& peer) { disconnects_.leave(peer); }
  void publish(LocalMemory& memory);
  bool published(const LocalMemory& memory) const;
  bool withdraw_step(LocalMemory& memory);
  // Where messages go from now on; empty: they wait in the pool.
  void set_message_callback(MessageCallback callback) { message_callback_ = std::move(callback); }

  TransferScheduler& scheduler() { return scheduler_; }

  // --- The worker's turn: post, poll, settle; true if anything happened.
  bool turn();
  // False: there is work already.
  bool prepare_sleep();
  // How long the worker may sleep although no descriptor says anything (links that wait for their fence or for a
  // time); nothing: as long as it likes.
  std::optional<std::chrono::milliseconds> longest_sleep() const;
  std::vector<int> fds() const;

 private:
  struct Place {
    Peer* peer = nullptr;
    Link* link = nullptr;
  };
  struct Ending {  // a link that is nobody's any more
    Domain* domain;
    LinkId link;
  };
  struct Untaken {  // a user's message that the pool has no room for
    Domain* domain;
    LinkId link;
    uint32_t slot;
    Bytes bytes;
  };

  // What a domain has told.
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
  // Of links_, by the low bits of the id: each immediate asks for its link, and a hash table would be most of its cost.
  struct Recent {
    LinkId id = 0;
    Place place;
  };
  std::array<Recent, 64> recent_{};
  std::vector<Ending> endings_;
  std::vector<std::shared_ptr<Peer>> falling_;  // down, and not all of their links are fenced
  std::deque<Untaken> untaken_;                 // oldest first
};

}  // namespace kvc
