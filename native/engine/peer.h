// Peer: another engine as this one knows it.
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

// How far two engines are with parting in good order (peer_disconnects.h).
struct Parting {
  bool ours = false;        // disconnect() was called here
  bool said = false;        // our goodbye is on its way
  bool arrived = false;     // the peer's engine has it
  bool heard = false;       // the peer's goodbye is here
  bool link_ended = false;  // the peer has fenced a link since
  bool fencing = false;
};

struct Peer {
  enum class State : uint8_t {
    kOffered,    // offer() was made; no way to write yet
    kConnected,  // a link is up or coming up
    kLeaving,    // what is open goes on, nothing new is opened (peer_disconnects.h)
    kDown,       // its last link broke: nothing more is posted
    kFencing,    // fence() has begun
  };

  Peer(PeerId peer_id, std::string peer_name) : id(peer_id), name(std::move(peer_name)) {}

  const PeerId id;
  const std::string name;

  // Written by the worker; what follows it may be read by any thread once this is not kOffered.
  std::atomic<State> state{State::kOffered};
  std::string provider;         // the lane's name
  uint32_t remote_domains = 0;  // the peer's domains in that lane: how many rkeys a region of it needs

  // Any thread: transfers to it that live, and those of them that are messages.
  std::atomic<uint32_t> transfers{0};
  std::atomic<uint32_t> messages{0};

  // Imported from it; guarded by the mutex of the engine's remote regions. Those of a fence that has begun are taken out by
  // and by, and ids may stay here whose region is gone.
  std::vector<RemoteRegionId> regions;

  // The worker's:
  std::vector<Link> links;                        // in the same order on both sides; none before it is connected
  DomainLimits limits;                            // of the lane
  IntrusiveList<Stream, &Stream::hook> runnable;  // streams with something to post, next one first
  uint32_t scatter_parts = 0;                     // streams of scatters to it that have not ended
  MessageWindow messages_seen;                    // those of the peer's that were taken
  std::optional<Error> down;                      // why nothing can be posted any more
  uint32_t next_link = 0;                         // where the search for the next batch's link begins
  uint32_t next_message = 0;                      // the number of the next message of the user's
  uint32_t unsettled_messages = 0;                // of the user's, in flight on a link when it broke
  bool offerer = false;                           // offer() was made here: this side makes its other links
  bool resting = false;                           // links are left that nobody has had a use for
  bool scheduled = false;                         // runnable is not empty and the poster knows
  Parting parting;
};

}  // namespace kvc
