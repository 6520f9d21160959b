// Link: one connection between a domain of this transfer engine and a domain of a peer.
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
    kProving,  // new: nothing is posted before the peer's first message over it
    kBroken,   // nothing is posted, and what was posted is not settled with the peer
    kOut,      // settled, or never made: both sides' accounts of it are closed
    kOffered,  // out, and offered to the peer
  };

  Link();
  Link(Domain* of, Connector* makes, uint32_t place, uint32_t local, uint32_t remote);
  ~Link();
  Link(Link&&) noexcept;
  Link& operator=(Link&&) noexcept;

  LinkId id = 0;  // the domain's id of the link; 0: the link is not made
  Domain* domain = nullptr;
  Connector* connector = nullptr;  // the domain's other half, for the control thread
  uint32_t domain_place = 0;       // index of the domain among all domains; selects the source's registration
  uint32_t local_domain = 0;       // index of the domain in its lane, which a pinned write names
  uint32_t remote_domain = 0;      // index of the peer's domain; selects the rkey of a region
  State state = State::kOut;
  bool fenced = true;  // no write of the peer can land over it

  // Relative cost of a byte: 1 on the peer's fastest link, more on a slower link or if links share a domain.
  double cost = 1;
  uint64_t bytes_in_flight = 0;  // posted and not completed; a page counts as at least 256 bytes
  uint32_t messages_in_flight = 0;

  // --- Used only if the peer has other links (link_keeper.h).
  uint32_t epoch = 0;                  // number of offers up to the one in use; the same on both sides
  LinkTally posted;                    // counted pages that this side posted over the link
  LinkTally counted;                   // counted pages that landed here
  std::vector<uint32_t> unsettled;     // flight table places of the work that ended when the link broke
  std::set<uint32_t> refused;          // counters whose batches the peer refused: their counts are unknown
  LinkId noted = 0;                    // the id under which the keeper has recorded its failure
  std::unique_ptr<LinkRepair> repair;  // set once the link has broken
};

}  // namespace kvc
