#include "engine/rewriter.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

namespace kvc {

std::vector<uint32_t> Rewriter::unsettled_counters(const Link& link) const {
  std::vector<uint32_t> counters;
  for (const uint32_t place : link.unsettled) {
    if (const std::optional<uint32_t> counter = flights_[place].counter()) counters.push_back(*counter);
  }
  std::sort(counters.begin(), counters.end());
  counters.erase(std::unique(counters.begin(), counters.end()), counters.end());
  return counters;
}

void Rewriter::recover(Peer& peer, Link& link, std::span<const Landed> landed) {
  // Counted entries are grouped by counter, the others by stream.
  std::map<uint32_t, Entries> counted;
  std::map<const Stream*, Entries> uncounted;
  for (const uint32_t place : std::exchange(link.unsettled, {})) {
    const Flight& flight = flights_[place];
    if (const std::optional<uint32_t> counter = flight.counter()) {
      counted[*counter].push_back(place);
    } else {
      uncounted[flight.stream].push_back(place);
    }
  }
  for (auto& [stream, entries] : uncounted) {
    if (any_given_up(entries)) {
      fail(entries, ErrorCode::kCancelled, "the transfer was cancelled or failed while its link was broken");
    } else {
      rewrite(peer, std::move(entries), std::nullopt, 0);
    }
  }
  for (auto& [counter, entries] : counted) {
    uint64_t pages = 0;
    for (const uint32_t place : entries) pages += flights_[place].pages;
    const auto found = std::lower_bound(landed.begin(), landed.end(), counter,
                                        [](const Landed& one, uint32_t than) { return one.counter < than; });
    const bool tells = found != landed.end() && found->counter == counter;
    const std::optional<uint32_t> posted = link.posted.pages(counter);
    if (!tells || !found->known || !posted || link.refused.contains(counter)) {
      fail(entries, ErrorCode::kPeerDown,
           "a link broke, and the number of pages that it had carried for this counter is unknown");
      continue;
    }
    const uint32_t missing = (*posted - found->pages) % LinkTally::kModulus;
    if (missing == 0) {
      for (const uint32_t place : entries) resolve_(place, nullptr, false);
    } else if (missing > pages) {
      fail(entries, ErrorCode::kPeerDown, "a link broke, and the peer counted fewer pages than had completed");
    } else if (found->released) {
      fail(entries, ErrorCode::kRefused, "a link broke, and the peer has released the counter since");
    } else if (found->acted_on && missing < pages && any_writes(entries)) {
      // Some of the pages were counted, but not which is known. These may hold other bytes by now.
      fail(entries, ErrorCode::kRefused,
           "a link broke, and the peer may have reused some of the pages: their counter has reached a target there, or "
           "a reader polls it");
    } else if (any_given_up(entries)) {
      fail(entries, ErrorCode::kCancelled,
           "a transfer with the same counter was cancelled or failed while its link was broken");
    } else {
      rewrite(peer, std::move(entries), counter, missing);
    }
  }
}

// Fails the entries. Both ends have closed the link, so no write lands over it any more.
void Rewriter::fail(const Entries& entries, ErrorCode code, const char* why) {
  const Error error{code, {}, {}, "write again", why};
  for (const uint32_t place : entries) resolve_(place, &error, false);
}

bool Rewriter::any_given_up(const Entries& entries) const {
  return std::any_of(entries.begin(), entries.end(),
                     [this](uint32_t place) { return given_up(*flights_[place].stream); });
}

bool Rewriter::any_writes(const Entries& entries) const {
  return std::any_of(entries.begin(), entries.end(), [this](uint32_t place) { return flights_[place].bytes > 0; });
}

bool Rewriter::given_up(const Stream& stream) const {
  if (stream.stopping()) return true;
  return stream.kind == Stream::Kind::kRecovery && any_given_up(static_cast<const Recovery&>(stream).entries);
}

// Repeats the pages of `entries` uncounted, then raises `counter` by the missing number. Which pages have landed is
// unknown, so none may be counted before all of them are in place.
void Rewriter::rewrite(Peer& peer, Entries entries, std::optional<uint32_t> counter, uint32_t missing) {
  Recovery& recovery = *recoveries_.emplace_back(std::make_unique<Recovery>(peer));
  recovery.place = std::prev(recoveries_.end());
  Rewrite again;
  for (const uint32_t place : entries) {
    const Flight& flight = flights_[place];
    if (flight.bytes > 0) again.batches.push_back({flight.request, flight.position, flight.pages});
    Stats::add(stats_.pages_rewritten, flight.source == nullptr ? 0 : flight.pages);
  }
  recovery.entries = std::move(entries);
  if (again.batches.empty()) {  // only immediates
    recovery.ready.push_back(Request::make(nullptr, nullptr, 0, counter, ImmediateOnly{missing}));
  } else {
    RequestRef request = Request::make(nullptr, nullptr, 0, counter, std::move(again));
    request->count_at_end(missing);
    recovery.ready.push_back(std::move(request));
  }
  start_(recovery);
}

void Rewriter::end(Recovery& recovery) {
  recovery.ended = true;
  const std::optional<Error>& error = recovery.error;
  for (const uint32_t place : std::exchange(recovery.entries, {})) {
    resolve_(place, error ? &*error : nullptr, !recovery.quiesced);
  }
  recoveries_.erase(recovery.place);
}

std::vector<Recovery*> Rewriter::of(const Peer& peer) const {
  std::vector<Recovery*> found;
  for (const auto& recovery : recoveries_) {
    if (recovery->peer == &peer) found.push_back(recovery.get());
  }
  return found;
}

}  // namespace kvc
