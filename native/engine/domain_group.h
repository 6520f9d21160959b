// DomainGroup: the domains of one engine, its lanes, and the links to its peers.
//
// Every method runs on the worker thread, and so does every domain's. All domains of one provider form a lane; a peer
// is reached over exactly one lane, with max(own, its) domains as the number of links (at most what was offered),
// so that each domain of either side carries traffic also where the two sides have different numbers of them. A link
// that breaks while the peer has others is the LinkKeeper's; with its last one the peer is down.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/counter_sets.h"
#include "engine/departures.h"
#include "engine/domain.h"
#include "engine/event_queue.h"
#include "engine/link_keeper.h"
#include "engine/memory_region.h"
#include "engine/message_pool.h"
#include "engine/peer.h"
#include "engine/registry.h"
#include "engine/stats.h"
#include "engine/transfer_scheduler.h"

namespace kvc {

struct Offer;

class DomainGroup final : private DomainSink, private LinkKeeper::Owner {
 public:
  DomainGroup(const EngineConfig& config, Registry<Peer>& peers, Registry<Transfer>& transfers,
              Registry<const RemoteRegion>& remote_regions, CounterSets& counters, EventQueue& events,
              MessagePool& messages, Stats& stats);
  ~DomainGroup() override;

  // Opens every configured domain. With allow_fallback, those that cannot be opened are left out (see unusable()),
  // as long as one is left.
  Status open();
  // Ends every peer and transfer. Keeps calling the domains until all links are fenced, or kCloseTimeout.
  void close();

  const std::vector<std::string>& descriptions() const { return descriptions_; }
  const std::vector<Error>& unusable() const { return unusable_; }

  // --- Control operations. Those that end in _step may have to be called again: until true.
  Status register_region(LocalRegion& region, int memfd, uint64_t memfd_offset);
  bool deregister_step(LocalRegion& region);
  std::vector<std::pair<std::string, std::vector<uint64_t>>> lane_rkeys(const LocalRegion& region) const;
  Result<Handshake> offer(PeerId id, std::string name);
  Result<Handshake> accept(PeerId id, std::string name, std::span<const std::byte> bytes);
  Status complete(const std::shared_ptr<Peer>& peer, std::span<const std::byte> bytes);
  bool fence_step(Peer& peer, const Error& why);
  // Begins to part from the peer in good order, if that has not begun (departures.h).
  void leave(const std::shared_ptr<Peer>& peer) { departures_.leave(peer); }
  // How many domains the peers of this lane are reached over; 0: no such lane.
  size_t lane_domains(std::string_view provider) const;
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
  struct Lane {
    std::string provider;
    std::vector<std::unique_ptr<Domain>> domains;
  };
  struct Orphan {  // a link without a peer: offered and not used, or refused half way
    Domain* domain;
    LinkId link;
  };
  struct Place {
    Peer* peer = nullptr;
    Link* link = nullptr;
  };

  void on_complete(WorkId work, const Error* error) noexcept override {
    if (Departures::owns(work)) return departures_.complete(work, error == nullptr);
    const TransferScheduler::Lost lost = scheduler_.complete(work, error);
    if (lost.link != nullptr) keeper_.broke(*lost.peer, *lost.link, lost.link->id, *error);
  }
  void on_immediate(LinkId link, uint32_t immediate) noexcept override;
  bool on_message(LinkId link, std::span<const std::byte> message) noexcept override;
  void on_link_down(LinkId link, const Error& error, bool fenced) noexcept override;

  LinkId new_link(Peer& peer, Link& link) override;
  void forget_link(LinkId id) override;
  void abandon_link(Domain& domain, LinkId id) override;
  void lose_peer(Peer& peer, Error error) override;

  Place find_link(LinkId id);
  static void weigh(Peer& peer);
  Lane* find_lane(std::string_view provider);
  Result<std::vector<Link>> accept_lane(Lane& lane, uint32_t offerer_domains, const std::vector<Bytes>& offers,
                                        std::vector<Bytes>& answers);
  void abandon(std::span<const Link> links);
  bool fence_links(Peer& peer);
  bool retry_orphans();
  bool deliver_messages();

  const EngineConfig& config_;
  Registry<Peer>& peers_;
  Registry<const RemoteRegion>& remote_regions_;
  CounterSets& counters_;
  EventQueue& events_;
  MessagePool& messages_;
  Stats& stats_;
  TransferScheduler scheduler_;
  LinkKeeper keeper_;
  Departures departures_;
  MessageCallback message_callback_;

  std::vector<Lane> lanes_;  // in order of preference
  std::vector<std::string> descriptions_;
  std::vector<Error> unusable_;
  std::unordered_map<LinkId, Place> links_;  // links of connected and offered peers
  // Of links_, by the low bits of the id: each immediate asks for its link, and a hash table would be most of its cost.
  struct Recent {
    LinkId id = 0;
    Place place;
  };
  std::array<Recent, 64> recent_{};
  std::vector<Orphan> orphans_;
};

}  // namespace kvc
