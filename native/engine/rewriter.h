// Rewriter: settles what was posted on a link that broke while its peer has others, and writes again what is missing.
//
// Such a link's unfinished batches are not failed but kept (Link::unsettled), until the LinkKeeper has asked the peer what
// landed; recover() then knows of each counter how much of it is missing (docs/architecture/transfer-engine.md, "Many NICs").
//
// Every method runs on the worker thread.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/flight_table.h"
#include "engine/peer.h"
#include "engine/stats.h"
#include "engine/stream.h"

namespace kvc {

// What the peer counted over a broken link, for one of its counters.
struct Landed {
  uint32_t counter = 0;
  uint32_t pages = 0;     // modulo LinkTally::kModulus
  bool released = false;  // the peer waits for it no longer
  bool acted_on = false;  // what it has counted may have a new owner there: CounterSets::acted_on()
  bool known = true;
};

// The writing of pages once more. The entries in flight that it writes again end as it ends.
struct Recovery : Stream {
  explicit Recovery(Peer& to) : Stream(Kind::kRecovery, to, nullptr) { sealed = true; }
  std::vector<uint32_t> entries;
  std::list<std::unique_ptr<Recovery>>::iterator place{};  // among the Rewriter's
};

class Rewriter {
 public:
  // `resolve(place, error, may_land)` ends an entry that is off its link already; `start(stream)` has a recovery posted.
  using Resolve = std::function<void(uint32_t place, const Error* error, bool may_land)>;
  using Start = std::function<void(Stream& stream)>;
  Rewriter(FlightTable& flights, Stats& stats, Resolve resolve, Start start)
      : flights_(flights), stats_(stats), resolve_(std::move(resolve)), start_(std::move(start)) {}

  // The counters of what is unsettled on it, each once.
  std::vector<uint32_t> unsettled_counters(const Link& link) const;
  // Settles it: what was counted is done, and the rest goes over the peer's other links. `landed` is by rising counter.
  void recover(Peer& peer, Link& link, std::span<const Landed> landed);

  // A transfer behind it was given up: nothing more of it may be posted.
  bool given_up(const Stream& stream) const;
  void end(Recovery& recovery);
  // Those of this peer.
  std::vector<Recovery*> of(const Peer& peer) const;

 private:
  using Entries = std::vector<uint32_t>;
  void rewrite(Peer& peer, Entries entries, std::optional<uint32_t> counter, uint32_t missing);
  void fail(const Entries& entries, ErrorCode code, const char* why);
  bool any_given_up(const Entries& entries) const;
  bool any_writes(const Entries& entries) const;  // not immediates alone

  FlightTable& flights_;
  Stats& stats_;
  const Resolve resolve_;
  const Start start_;
  // One for each counter of a broken link's, so thousands may be under way.
  std::list<std::unique_ptr<Recovery>> recoveries_;
};

}  // namespace kvc
