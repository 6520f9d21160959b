// Link: one connection between one of our domains and one of a peer's.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "base/error.h"
#include "engine/link_tally.h"
#include "lane/domain.h"

namespace kvc {

struct LinkRepair;  // link_keeper.h

struct Link {
  enum class State : uint8_t {
    kUp,
    kProving,  // made anew: nothing is posted before the peer's first message over it
    kBroken,   // nothing is posted, and what was posted is not settled with the peer
    kOut,      // settled, or never made: neither end owes the other anything on it
    kOffered,  // out, and offered to the peer
  };

  Link();
  Link(Domain* of, Connector* makes, uint32_t place, uint32_t local, uint32_t remote);
  ~Link();
  Link(Link&&) noexcept;
  Link& operator=(Link&&) noexcept;

  LinkId id = 0;  // under which the domain knows it; 0: it is not made
  Domain* domain = nullptr;
  Connector* connector = nullptr;  // the domain's other half, for the control thread
  uint32_t domain_place = 0;   // the domain's among all of the engine's: whose registration of a source goes with it
  uint32_t local_domain = 0;   // and in its lane: what a pinned write names
  uint32_t remote_domain = 0;  // whose rkey of a region goes with this link
  State state = State::kOut;
  bool fenced = true;  // nothing of the peer can land over it

  // What a byte costs on it: 1 on a peer's fastest link, more on a slower one or where links share a domain.
  double cost = 1;
  uint64_t bytes_in_flight = 0;  // posted and not completed; a page counts as 256 bytes at least
  uint32_t messages_in_flight = 0;

  // --- Only where the peer has other links besides (link_keeper.h).
  uint32_t epoch = 0;  // how often it was offered anew, until the offer that is in use: the same on both sides
  LinkTally posted;    // what we posted over it, counted,
  LinkTally counted;   // and what landed here
  std::vector<uint32_t> unsettled;     // places in the flight table of what ended when it broke
  std::set<uint32_t> refused;          // counters whose batches the peer refused: their counts are not known
  LinkId noted = 0;                    // the keeper has a note that it broke under this id
  std::unique_ptr<LinkRepair> repair;  // once it has broken
};

}  // namespace kvc
