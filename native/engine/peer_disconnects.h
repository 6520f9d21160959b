// PeerDisconnects: peers that part in good order, so that neither side loses anything and neither sees an error.
//
// Both sides do the same, whoever began: nothing new is opened towards the peer (Peer::State::kLeaving), what is open goes
// on until it has ended, and then GOODBYE is sent. Who knows that its own has arrived and has heard the peer's fences the
// peer and forgets it. A link that ends after both were sent is the peer's fence and no failure.
//
// Every method runs on the worker thread. A transfer is counted before its opener looks at the peer's state, and here the
// state is set before the count is read: so none is opened that is not waited for.
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
  // `fence`: one step of fencing a peer; true once it is fenced and forgotten. `say`: sends the peer this goodbye; false:
  // no link takes it now.
  PeerDisconnects(EventQueue& events, std::function<bool(Peer&)> fence,
                  std::function<bool(Peer&, std::span<const std::byte>)> say)
      : events_(events), fence_(std::move(fence)), say_(std::move(say)) {}

  // disconnect() was called here. Idempotent.
  void leave(const std::shared_ptr<Peer>& peer);
  // The peer's goodbye came.
  void hear(const std::shared_ptr<Peer>& peer);
  // A link to the peer ended: true if that is how it parts.
  bool link_ended(Peer& peer);

  // The goodbye to this peer is with its engine, or will not be.
  void said(PeerId peer, bool arrived);

  // Takes every disconnect as far as it goes; true if anything happened.
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
