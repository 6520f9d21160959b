// Peer: another transfer engine as this one knows it.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/link.h"
#include "engine/message_window.h"
#include "engine/stream.h"
#include "engine/transfer_engine.h"
#include "lane/domain.h"

namespace kvc {

// Progress of two transfer engines in a graceful disconnect (peer_disconnects.h).
struct Parting {
  bool ours = false;        // disconnect() was called here
  bool said = false;        // this side has sent its goodbye
  bool arrived = false;     // the peer's transfer engine has it
  bool heard = false;       // the peer's goodbye has arrived
  bool link_ended = false;  // the peer has fenced a link since
  bool fencing = false;
};

struct Peer {
  enum class State : uint8_t {
    kOffered,    // offer() was made; writes are not possible yet
    kConnected,  // a link is up or coming up
    kLeaving,    // open transfers continue, new ones are refused (peer_disconnects.h)
    kDown,       // its last link broke: nothing more is posted
    kFencing,    // fence() has begun
  };

  Peer(PeerId peer_id, std::string peer_name) : id(peer_id), name(std::move(peer_name)) {}

  const PeerId id;
  const std::string name;

  // Written by the transfer thread. Any thread may read the next fields once the state is not kOffered.
  std::atomic<State> state{State::kOffered};
  std::string provider;         // the lane's name
  uint32_t remote_domains = 0;  // number of the peer's domains in that lane, and of rkeys that its regions need

  // Any thread: live transfers to the peer, and how many of them are messages.
  std::atomic<uint32_t> transfers{0};
  std::atomic<uint32_t> messages{0};

  // Regions imported from the peer, guarded by the mutex of the registry of remote regions. A fence removes them in
  // steps, and ids whose region is gone may remain.
  std::vector<RemoteRegionId> regions;

  // Used on the transfer thread:
  std::vector<Link> links;                        // in the same order on both sides; empty before the peer is connected
  DomainLimits limits;                            // of the lane
  IntrusiveList<Stream, &Stream::hook> runnable;  // streams with something to post, next one first
  uint32_t scatter_parts = 0;                     // streams of scatters to the peer that have not ended
  MessageWindow messages_seen;                    // sequence numbers of the peer's messages that were taken
  std::optional<Error> down;                      // why nothing can be posted any more
  uint32_t next_link = 0;                         // index of the link where the search for the next batch's link begins
  uint32_t next_message = 0;                      // sequence number of the next user message
  uint32_t unsettled_messages = 0;                // user messages that were in flight on a link when it broke
  bool offerer = false;                           // offer() was made here: this side makes the other links
  bool resting = false;                           // some links were not made, because they were not needed yet
  bool scheduled = false;                         // the poster has this peer in its list
  Parting parting;
};

}  // namespace kvc
