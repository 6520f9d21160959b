// GroupTransfer: a scatter or a barrier. One transfer to each member of a peer group, and one event for all of them.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/event_queue.h"
#include "engine/peer.h"
#include "engine/registry.h"
#include "engine/stats.h"
#include "engine/transfer_engine.h"

namespace kvc {

// The members keep being known when they are gone: they then fail.
struct PeerGroup {
  std::vector<std::shared_ptr<Peer>> members;
};

class GroupTransfer {
 public:
  // `parts` calls of ended() will follow; `forget` takes it out of its registry, and says false if it was not there.
  GroupTransfer(TransferId id, size_t parts, EventCallback callback)
      : id_(id), callback_(std::move(callback)), parts_left_(parts) {}

  TransferId id() const { return id_; }
  bool has_callback() const { return static_cast<bool>(callback_); }
  // The transfers that it is made of, for cancel(). Set before the worker knows of any.
  std::vector<TransferId> parts;

  // On the worker: the part for this peer ended with `event`. The last one reports.
  void ended(PeerId peer, const Event& event, Registry<GroupTransfer>& groups, EventQueue& events, Stats& stats);

 private:
  const TransferId id_;
  const EventCallback callback_;
  size_t parts_left_;
  bool cancelled_ = false;
  Event event_;
};

}  // namespace kvc
