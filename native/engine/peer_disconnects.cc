#include "engine/peer_disconnects.h"

#include <algorithm>
#include <array>

#include "engine/message.h"

namespace kvc {

void PeerDisconnects::begin(const std::shared_ptr<Peer>& peer) {
  if (peer->state.load(std::memory_order_relaxed) != Peer::State::kConnected) return;
  peer->state.store(Peer::State::kLeaving, std::memory_order_seq_cst);
  leaving_.push_back(peer);
}

void PeerDisconnects::leave(const std::shared_ptr<Peer>& peer) {
  peer->parting.ours = true;
  begin(peer);
}

void PeerDisconnects::hear(const std::shared_ptr<Peer>& peer) {
  peer->parting.heard = true;
  begin(peer);
}

bool PeerDisconnects::link_ended(Peer& peer) {
  if (!peer.parting.heard || !peer.parting.said) return false;
  peer.parting.link_ended = true;
  return true;
}

void PeerDisconnects::said(PeerId to, bool arrived) {
  const auto found = std::find_if(leaving_.begin(), leaving_.end(), [&](const auto& peer) { return peer->id == to; });
  if (found == leaving_.end()) return;
  Parting& parting = (*found)->parting;
  parting.arrived |= arrived;
  // The link broke, so the goodbye is sent again over another link; receiving it twice does no harm. After the peer's
  // own goodbye, a break is the peer's fence, and the peer may not have acknowledged what it took.
  if (!arrived && !parting.heard) parting.said = false;
}

bool PeerDisconnects::turn() {
  bool any = false;
  // Not erase_if: a step handles events of the fenced domain, which may concern a goodbye and search this list.
  for (size_t i = 0; i < leaving_.size();) {
    const std::shared_ptr<Peer> peer = leaving_[i];
    if (step(*peer, any)) {
      leaving_.erase(leaving_.begin() + static_cast<ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  return any;
}

// Returns true if the disconnect is finished, with any outcome.
bool PeerDisconnects::step(Peer& peer, bool& any) {
  Parting& parting = peer.parting;
  const Peer::State state = peer.state.load(std::memory_order_relaxed);
  // The last link broke, or fence() was called for the peer. Both are reported elsewhere.
  if (state != Peer::State::kLeaving && !parting.fencing) return true;
  if (!parting.said && peer.transfers.load(std::memory_order_seq_cst) == 0 && peer.scatter_parts == 0) {
    parting.said = say_(peer, std::array{static_cast<std::byte>(MessageTag::kGoodbye)});
    any |= parting.said;
  }
  if (!parting.heard || (!parting.arrived && !parting.link_ended)) return false;
  parting.fencing = true;
  if (!fence_(peer)) return false;
  any = true;
  if (!parting.ours) events_.push(Event{.kind = EventKind::kPeerLeft, .id = peer.id});
  return true;
}

}  // namespace kvc
