// PeerDisconnects: graceful disconnects, in which neither side loses data or sees an error.
//
// Both sides act alike, whichever side began. They open no new transfer to the peer (Peer::State::kLeaving), wait for
// the end of the open ones, and send GOODBYE. A side whose goodbye has arrived and that has received the peer's goodbye
// fences and forgets the peer. If a link ends after both goodbyes were sent, the peer has fenced it, which is no
// failure.
//
// Every method runs on the transfer thread. A transfer is counted before its opener reads the peer's state, and this
// class sets the state before it reads the count. So every opened transfer is waited for.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/event_queue.h"
#include "engine/peer.h"

namespace kvc {

class PeerDisconnects {
 public:
  // `fence` runs one step of fencing a peer and returns true once the peer is fenced and forgotten. `say` sends a
  // goodbye to the peer and returns false if no link takes it now.
  PeerDisconnects(EventQueue& events, std::function<bool(Peer&)> fence,
                  std::function<bool(Peer&, std::span<const std::byte>)> say)
      : events_(events), fence_(std::move(fence)), say_(std::move(say)) {}

  // Handles a call of disconnect() on this side. Idempotent.
  void leave(const std::shared_ptr<Peer>& peer);
  // Handles the peer's goodbye.
  void hear(const std::shared_ptr<Peer>& peer);
  // Handles the end of a link to the peer. Returns true if it is part of a graceful disconnect.
  bool link_ended(Peer& peer);

  // Reports whether the goodbye to this peer has arrived at its transfer engine, or never will.
  void said(PeerId peer, bool arrived);

  // Advances every disconnect as far as possible. Returns true if anything happened.
  bool turn();
  bool empty() const { return leaving_.empty(); }

 private:
  void begin(const std::shared_ptr<Peer>& peer);
  bool step(Peer& peer, bool& any);

  EventQueue& events_;
  const std::function<bool(Peer&)> fence_;
  const std::function<bool(Peer&, std::span<const std::byte>)> say_;
  std::vector<std::shared_ptr<Peer>> leaving_;
};

}  // namespace kvc
