// Rewriter: settles what was posted on a broken link of a peer that has other links, and repeats the missing writes.
//
// The unfinished batches of such a link do not fail. Link::unsettled keeps them until the LinkKeeper has asked the peer
// what landed. recover() then computes how much of each counter is missing. See "Many NICs" in
// docs/architecture/transfer-engine.md.
//
// Every method runs on the transfer thread.
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

// What the peer counted for one of its counters over a broken link.
struct Landed {
  uint32_t counter = 0;
  uint32_t pages = 0;     // modulo LinkTally::kModulus
  bool released = false;  // the peer has released the counter
  bool acted_on = false;  // the pages that it counted may have a new owner there: CounterSets::acted_on()
  bool known = true;
};

// A stream that repeats writes. The flight table entries that it repeats end when it ends.
struct Recovery : Stream {
  explicit Recovery(Peer& to) : Stream(Kind::kRecovery, to, nullptr) { sealed = true; }
  std::vector<uint32_t> entries;
  std::list<std::unique_ptr<Recovery>>::iterator place{};  // its place in the Rewriter's list
};

class Rewriter {
 public:
  // `resolve(place, error, may_land)` ends an entry that is off its link already. `start(stream)` posts a recovery.
  using Resolve = std::function<void(uint32_t place, const Error* error, bool may_land)>;
  using Start = std::function<void(Stream& stream)>;
  Rewriter(FlightTable& flights, Stats& stats, Resolve resolve, Start start)
      : flights_(flights), stats_(stats), resolve_(std::move(resolve)), start_(std::move(start)) {}

  // The counters of the unsettled entries of `link`, each once.
  std::vector<uint32_t> unsettled_counters(const Link& link) const;
  // Settles the link. Counted entries are done, and the rest is repeated over the peer's other links. `landed` is
  // sorted by counter.
  void recover(Peer& peer, Link& link, std::span<const Landed> landed);

  // True if a transfer behind the stream was cancelled or has failed: nothing more of it may be posted.
  bool given_up(const Stream& stream) const;
  void end(Recovery& recovery);
  // The recoveries of this peer.
  std::vector<Recovery*> of(const Peer& peer) const;

 private:
  using Entries = std::vector<uint32_t>;
  void rewrite(Peer& peer, Entries entries, std::optional<uint32_t> counter, uint32_t missing);
  void fail(const Entries& entries, ErrorCode code, const char* why);
  bool any_given_up(const Entries& entries) const;
  bool any_writes(const Entries& entries) const;  // whether any of them is more than an immediate

  FlightTable& flights_;
  Stats& stats_;
  const Resolve resolve_;
  const Start start_;
  // One for each counter of a broken link, so thousands may be active.
  std::list<std::unique_ptr<Recovery>> recoveries_;
};

}  // namespace kvc
