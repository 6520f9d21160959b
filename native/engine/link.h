// Link: one connection between one of our domains and one of a peer's.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/domain.h"
#include "engine/error.h"
#include "engine/link_tally.h"

namespace kvc {

struct LinkRepair;  // link_keeper.h

struct Link {
  enum class State : uint8_t {
    kUp,
    kProving,  // brought back: nothing is posted before the peer's first message over it
    kBroken,   // nothing is posted, and what was posted is not settled with the peer
    kOut,      // settled: neither end owes the other anything on it
    kOffered,  // out, and offered to the peer anew
  };

  Link();
  Link(LinkId link_id, Domain* of, uint32_t local, uint32_t remote = 0);
  ~Link();
  Link(Link&&) noexcept;
  Link& operator=(Link&&) noexcept;

  LinkId id = 0;
  Domain* domain = nullptr;
  uint32_t local_domain = 0;   // the domain's place in its lane: what a pinned write names
  uint32_t remote_domain = 0;  // whose rkey of a region goes with this link
  State state = State::kUp;
  bool fenced = false;
  std::optional<Error> broken{};  // of an offered peer's link: complete() will refuse an answer that uses it

  // What a byte costs on it: 1 on a peer's fastest link, more on a slower one or where links share a domain.
  double cost = 1;
  uint64_t bytes_in_flight = 0;  // posted and not completed; a page counts as 256 bytes at least
  uint32_t messages_in_flight = 0;

  // --- Only where the peer has other links besides (link_keeper.h).
  uint32_t epoch = 0;  // how often it was offered anew, until the offer that is in use: the same on both sides
  LinkTally posted;    // what we posted over it, counted,
  LinkTally counted;   // and what landed here
  std::vector<uint32_t> unsettled;     // the scheduler's entries in flight that ended when it broke
  std::vector<uint32_t> refused;       // counters whose batches the peer refused: their counts are not known
  std::unique_ptr<LinkRepair> repair;  // once it has broken
};

}  // namespace kvc
