#include "engine/transfer_scheduler.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <iterator>
#include <map>
#include <utility>

#include "engine/immediate.h"

namespace kvc {

namespace {

// Batches that one transfer posts before the next one of the same peer has its turn, and batches a peer posts before
// the next peer has. Small enough that completions and commands are looked at every few tens of microseconds.
constexpr uint32_t kTransferQuantum = 4;
constexpr uint32_t kPeerQuantum = 16;

// Parts of a single write that is split over links. A split write is counted by an immediate of its own after its
// parts have completed: one more round trip, 10 us with events on both sides. A link of 50 GB/s (400G) carries 512 KiB
// in that time: from twice as much on, two links win what the round trip costs, and more on slower links.
constexpr uint64_t kPartBytes = 512 << 10;
// Parts that a link gets of a large write at least, so that unequal links end at about the same time.
constexpr uint64_t kPartsPerLink = 4;
constexpr uint64_t kPartAlignment = 4096;  // a page of memory: no two links write into one

// What a page takes of a link's window at least: a work request and its share of a header. It bounds the pages in
// flight on a link, which LinkTally relies on.
constexpr uint64_t kLeastCharge = 256;
static_assert((uint64_t{128} << 20) / kLeastCharge < LinkTally::kModulus / 2);

// The user's messages in flight on a link. Every provider has room for 16 that the peer has not taken, so internal
// messages always find room beside them.
constexpr uint32_t kMessageWindow = 8;

// After these the receiver has refused the batch, or the sender never sent it: nothing of it can land later. Any
// other failure leaves that open.
bool leaves_nothing_behind(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kUnknownRegion:
    case ErrorCode::kOutOfRange:
    case ErrorCode::kRefused:
    case ErrorCode::kResources:
      return true;
    default:
      return false;
  }
}

}  // namespace

// --- Commands

void TransferScheduler::add(Transfer& transfer, std::shared_ptr<Request> request) {
  if (transfer.ended || transfer.stopping() || request->done()) return;
  if (transfer.peer->down) return fail(transfer, *transfer.peer->down);
  transfer.ready.push_back(std::move(request));
  make_runnable(transfer);
}

void TransferScheduler::arm(ArmedPlan plan) {
  Transfer& transfer = *plan.transfer;
  if (transfer.ended || transfer.stopping() || plan.layers.empty()) return;
  if (transfer.peer->down) return fail(transfer, *transfer.peer->down);
  std::stable_sort(plan.layers.begin(), plan.layers.end(),
                   [](const ArmedLayer& a, const ArmedLayer& b) { return a.signal_value < b.signal_value; });
  ++transfer.armed_plans;
  armed_.push_back(std::move(plan));
}

void TransferScheduler::seal(Transfer& transfer) {
  if (transfer.ended) return;
  transfer.sealed = true;
  touch(transfer);
}

void TransferScheduler::cancel(Transfer& transfer) {
  transfer.cancelled = true;
  drop_pending(transfer);
  touch(transfer);
}

void TransferScheduler::fail_peer(Peer& peer, const Error& error) {
  if (!peer.down) peer.down = error;
  for (const std::shared_ptr<Transfer>& transfer : transfers_.all()) {
    if (transfer->peer.get() == &peer && !transfer->ended) fail(*transfer, error);
  }
  for (const std::shared_ptr<Transfer>& recovery : recoveries_) {
    if (recovery->peer.get() == &peer) fail(*recovery, error);
  }
  // What waited for a settlement: it may land as long as the links are not fenced.
  for (Link& link : peer.links) {
    for (const uint32_t index : std::exchange(link.unsettled, {})) resolve(index, &error, true);
  }
  // Its links are on their way out with the peer: nobody may find it here.
  std::erase(active_, &peer);
  peer.scheduled = false;
}

// --- Posting

bool TransferScheduler::has_due_layers() const {
  return std::any_of(armed_.begin(), armed_.end(),
                     [](const ArmedPlan& plan) { return plan.signal->polled() || plan.due(); });
}

bool TransferScheduler::post_due_layers() {
  bool any = false;
  for (size_t i = 0; i < armed_.size();) {
    ArmedPlan& plan = armed_[i];
    Transfer& transfer = *plan.transfer;
    if (transfer.stopping()) {  // settle() will drop the plan
      ++i;
      continue;
    }
    while (plan.next < plan.layers.size() && plan.due()) {
      const ArmedLayer& layer = plan.layers[plan.next++];
      transfer.ready.push_back(
          std::make_shared<Request>(plan.source, plan.target, plan.page_bytes, layer.immediate,
                                    TableWrite{plan.table, layer.source_offset, layer.target_offset}));
      make_runnable(transfer);
      any = true;
    }
    if (plan.next < plan.layers.size()) {
      ++i;
      continue;
    }
    --transfer.armed_plans;
    std::swap(plan, armed_.back());
    armed_.pop_back();
  }
  return any;
}

bool TransferScheduler::post() {
  bool any = false;
  for (size_t i = 0; i < active_.size();) {
    Peer& peer = *active_[i];
    any |= post_peer(peer);
    if (!peer.runnable.empty()) {
      ++i;
      continue;
    }
    peer.scheduled = false;
    std::swap(active_[i], active_.back());
    active_.pop_back();
  }
  return any;
}

bool TransferScheduler::post_peer(Peer& peer) {
  uint32_t posted = 0;
  bool blocked = false;
  while (!blocked && posted < kPeerQuantum && !peer.runnable.empty()) {
    Transfer& transfer = *peer.runnable.front();
    uint32_t turn = 0;
    Outcome outcome = Outcome::kPosted;
    while (turn < kTransferQuantum && (outcome = post_batch(transfer)) == Outcome::kPosted) ++turn;
    posted += turn;
    blocked = outcome == Outcome::kBlocked;
    if (outcome == Outcome::kNothing) {
      peer.runnable.pop_front();
      transfer.runnable = false;
    } else if (outcome == Outcome::kWaits) {
      peer.runnable.pop_front();
      waiting_.push_back(&transfer);  // for the next turn; messages that nobody reads, say, stop no writes
    } else if (turn > 0 && peer.runnable.size() > 1) {
      // It had its turn. One that could not post at all keeps its place at the front.
      peer.runnable.pop_front();
      peer.runnable.push_back(&transfer);
    }
  }
  peer.runnable.insert(peer.runnable.end(), waiting_.begin(), waiting_.end());
  waiting_.clear();
  return posted > 0;
}

Link* TransferScheduler::pick_link(Peer& peer, const Request& request, const Request::Batch& batch, uint64_t charge,
                                   uint32_t tried) {
  const std::optional<uint32_t> domain = request.domain();
  const bool pinned = domain && std::any_of(peer.links.begin(), peer.links.end(), [&](const Link& link) {
                        return link.state == Link::State::kUp && link.local_domain == *domain;
                      });
  const auto count = static_cast<uint32_t>(peer.links.size());
  Link* best = nullptr;
  double best_time = 0;
  uint32_t index = peer.next_link;
  uint32_t chosen = index;
  for (uint32_t i = 0; i < count; ++i, index = index + 1 == count ? 0 : index + 1) {
    Link& link = peer.links[index];
    if (link.state != Link::State::kUp || ((tried >> index) & 1) != 0) continue;
    if (pinned && link.local_domain != *domain) continue;
    const bool room = batch.message != nullptr
                          ? link.messages_in_flight < kMessageWindow
                          : link.bytes_in_flight == 0 || link.bytes_in_flight + charge <= peer.limits.window_bytes;
    if (!room) continue;
    const double time = static_cast<double>(link.bytes_in_flight + charge) * link.cost;
    if (best == nullptr || time < best_time) {
      best = &link;
      best_time = time;
      chosen = index;
    }
  }
  // Equals take turns.
  if (best != nullptr) peer.next_link = chosen + 1 == count ? 0 : chosen + 1;
  return best;
}

TransferScheduler::Outcome TransferScheduler::post_batch(Transfer& transfer) {
  if (transfer.stopping() || transfer.ready.empty()) return Outcome::kNothing;
  if (!transfer.recovers.empty() && given_up(transfer)) {
    fail(transfer, Error{ErrorCode::kCancelled, {}, {}, "write again", "a transfer on the broken link was given up"});
    return Outcome::kNothing;
  }
  Peer& peer = *transfer.peer;
  // Kept: a completion from within post() may put another request in front of it.
  const std::shared_ptr<Request> request = transfer.ready.front();
  if (peer.links.size() > 1 && request->splittable() >= 2 * kPartBytes) split(peer, *request);

  std::array<PageWrite, Immediate::kMaxMultiplicity> pages;
  const Request::Batch batch = request->batch(request->position(), pages, peer.limits.batch_bytes);
  if (batch.source != nullptr && !batch.source->live.load(std::memory_order_relaxed)) {
    fail(transfer, Error{ErrorCode::kUnknownRegion,
                         {},
                         {},
                         "post",
                         "source region " + std::to_string(batch.source->id) + " was deregistered"});
    return Outcome::kNothing;
  }
  if (request->needs_number()) {
    if (peer.unsettled_messages > 0) return Outcome::kWaits;  // MessageWindow's condition
    request->number(peer.next_message++);
  }
  WriteBatch wire{.page_bytes = batch.page_bytes, .pages = std::span(pages).first(batch.pages)};
  if (batch.target != nullptr) wire.target_base = batch.target->base;
  if (request->counted()) {
    wire.counted = true;
    wire.immediate = Immediate::with_multiplicity(*request->immediate(), static_cast<uint32_t>(batch.pages));
  }
  const uint64_t bytes = batch.bytes();
  const uint64_t charge = batch.message != nullptr ? 0 : std::max(bytes, batch.pages * kLeastCharge);

  uint32_t tried = 0;
  while (Link* link = pick_link(peer, *request, batch, charge, tried)) {
    if (batch.target != nullptr) wire.rkey = batch.target->rkeys[link->remote_domain];
    // Everything before post(): a domain may complete the batch within it.
    wire.work = take_entry(InFlight{.transfer = &transfer,
                                    .request = request,
                                    .position = request->position(),
                                    .pages = static_cast<uint32_t>(batch.pages),
                                    .bytes = bytes,
                                    .charge = charge,
                                    .link = link,
                                    .source = batch.source,
                                    .message = batch.message != nullptr});
    ++transfer.batches_in_flight;
    ++request->in_flight;
    request->advance(batch.steps);
    const bool last = request->done();
    const Posted posted = batch.message != nullptr ? link->domain->send(link->id, wire.work, *batch.message)
                                                   : link->domain->post(link->id, wire);
    if (posted == Posted::kYes) {
      if (wire.counted && peer.links.size() > 1) link->posted.add(wire.immediate);
      if (batch.message == nullptr) Stats::add(stats_.batches_posted, 1);
      if (batch.source != nullptr && transfer.recovers.empty()) {
        Stats::add(transfer.progress.pages_posted, request->in_parts() ? (last ? 1 : 0) : batch.pages);
        Stats::add(transfer.progress.bytes_posted, bytes);
      }
      if (last) remove_ready(transfer, request);
      return Outcome::kPosted;
    }
    request->retreat(batch.steps);
    --request->in_flight;
    --transfer.batches_in_flight;
    put_back(wire.work);
    tried |= 1U << (link - peer.links.data());
  }
  return batch.message != nullptr || request->domain() ? Outcome::kWaits : Outcome::kBlocked;
}

void TransferScheduler::remove_ready(Transfer& transfer, const std::shared_ptr<Request>& request) {
  if (transfer.ready.front() == request) {
    transfer.ready.pop_front();
  } else {
    std::erase(transfer.ready, request);
  }
}

void TransferScheduler::split(const Peer& peer, Request& request) {
  const auto up = static_cast<uint64_t>(std::count_if(peer.links.begin(), peer.links.end(),
                                                      [](const Link& link) { return link.state == Link::State::kUp; }));
  if (request.position() > 0 || up < 2) return;
  const uint64_t part = std::clamp(request.splittable() / (kPartsPerLink * up), kPartBytes,
                                   std::max(kPartBytes, peer.limits.batch_bytes));
  request.split((part + kPartAlignment - 1) / kPartAlignment * kPartAlignment);
}

bool TransferScheduler::send(Peer& peer, std::span<const std::byte> message, Link* only) {
  for (Link& link : peer.links) {
    if (only != nullptr ? &link != only : link.state != Link::State::kUp) continue;
    const WorkId work = take_entry(InFlight{.link = &link, .message = true});
    if (link.domain->send(link.id, work, message) == Posted::kYes) return true;
    put_back(work);
  }
  return false;
}

WorkId TransferScheduler::take_entry(InFlight entry) {
  if (free_entries_.empty()) {
    free_entries_.push_back(static_cast<uint32_t>(slab_.size()));
    slab_.emplace_back();
  }
  const uint32_t index = free_entries_.back();
  free_entries_.pop_back();
  entry.used = true;
  entry.generation = slab_[index].generation;
  entry.link->bytes_in_flight += entry.charge;
  if (entry.message) ++entry.link->messages_in_flight;
  if (entry.source != nullptr) ++entry.source->batches_in_flight;
  slab_[index] = std::move(entry);
  return (static_cast<WorkId>(slab_[index].generation) << 32) | index;
}

// Of an entry that was not posted.
void TransferScheduler::put_back(WorkId work) {
  const auto index = static_cast<uint32_t>(work);
  InFlight& entry = slab_[index];
  leave_link(entry);
  if (entry.source != nullptr) --entry.source->batches_in_flight;
  entry = InFlight{.generation = entry.generation};
  free_entries_.push_back(index);
}

void TransferScheduler::leave_link(InFlight& entry) {
  entry.link->bytes_in_flight -= entry.charge;
  if (entry.message) --entry.link->messages_in_flight;
}

// --- Completion

TransferScheduler::Lost TransferScheduler::complete(WorkId work, const Error* error) noexcept {
  const auto index = static_cast<uint32_t>(work);
  const bool known =
      index < slab_.size() && slab_[index].used && slab_[index].generation == static_cast<uint32_t>(work >> 32);
  assert(known && "a domain completed a batch that is not in flight");
  if (!known) return {};
  InFlight& entry = slab_[index];
  leave_link(entry);
  if (entry.transfer == nullptr) {  // an internal message: who sent it asks again
    free_entry(index);
    return {};
  }
  Peer& peer = *entry.transfer->peer;
  if (error != nullptr && peer.links.size() > 1 && !peer.down && !leaves_nothing_behind(error->code)) {
    entry.link->unsettled.push_back(index);
    if (entry.message) ++peer.unsettled_messages;
    entry.waits = true;
    return {&peer, entry.link};
  }
  resolve(index, error, error != nullptr && !leaves_nothing_behind(error->code));
  return {};
}

// Ends an entry, off its link already. `may_land`: its pages may still land at the peer.
void TransferScheduler::resolve(uint32_t index, const Error* error, bool may_land) {
  InFlight entry = std::move(slab_[index]);
  free_entry(index);
  Transfer& transfer = *entry.transfer;
  if (entry.waits && entry.message) --transfer.peer->unsettled_messages;
  --transfer.batches_in_flight;
  --entry.request->in_flight;
  if (entry.source != nullptr) --entry.source->batches_in_flight;
  if (error == nullptr) {
    // A rewritten page was counted as written when it was posted first, or will be.
    if (entry.source != nullptr && transfer.recovers.empty()) {
      const uint64_t pages = entry.request->in_parts() ? 0 : entry.pages;
      Stats::add(transfer.progress.pages_done, pages);
      Stats::add(transfer.progress.bytes_done, entry.bytes);
      Stats::add(stats_.pages_written, pages);
      Stats::add(stats_.bytes_written, entry.bytes);
    }
    if (entry.request->in_flight == 0 && entry.request->done()) finish_request(transfer, *entry.request);
  } else {
    if (may_land) transfer.quiesced = false;
    if (entry.counter() && transfer.peer->links.size() > 1) entry.link->refused.push_back(*entry.counter());
    record(transfer, *error);
  }
  // An open transfer does not end here: it is not looked at.
  const bool may_end = transfer.batches_in_flight == 0 && (transfer.sealed || transfer.stopping());
  if (may_end || error != nullptr) touch(transfer);
}

// All of it was posted and has completed.
void TransferScheduler::finish_request(Transfer& transfer, const Request& request) {
  if (transfer.stopping()) return;
  if (request.in_parts()) {
    Stats::add(transfer.progress.pages_done, 1);
    Stats::add(stats_.pages_written, 1);
  }
  if (request.pages_at_end() == 0) return;
  transfer.ready.push_front(
      std::make_shared<Request>(nullptr, nullptr, 0, request.immediate(), ImmediateOnly{request.pages_at_end()}));
  make_runnable(transfer);
}

void TransferScheduler::free_entry(uint32_t index) {
  InFlight& entry = slab_[index];
  entry = InFlight{.generation = entry.generation + 1};
  free_entries_.push_back(index);
}

// --- Recovery

std::optional<uint32_t> TransferScheduler::InFlight::counter() const {
  if (request == nullptr || !request->counted()) return std::nullopt;
  return Immediate::with_multiplicity(*request->immediate(), 1);
}

std::vector<uint32_t> TransferScheduler::unsettled_counters(const Link& link) const {
  std::vector<uint32_t> counters;
  for (const uint32_t index : link.unsettled) {
    if (const std::optional<uint32_t> counter = slab_[index].counter()) counters.push_back(*counter);
  }
  std::sort(counters.begin(), counters.end());
  counters.erase(std::unique(counters.begin(), counters.end()), counters.end());
  return counters;
}

void TransferScheduler::recover(Link& link, std::span<const Landed> landed) {
  // Counted entries by their counter; the others are nobody's affair but their transfer's.
  std::map<uint32_t, std::vector<uint32_t>> counted;
  std::map<const Transfer*, std::vector<uint32_t>> uncounted;
  for (const uint32_t index : std::exchange(link.unsettled, {})) {
    const InFlight& entry = slab_[index];
    if (const std::optional<uint32_t> counter = entry.counter()) {
      counted[*counter].push_back(index);
    } else {
      uncounted[entry.transfer].push_back(index);
    }
  }
  const auto fail_all = [&](const std::vector<uint32_t>& entries, ErrorCode code, const char* why) {
    const Error error{code, {}, {}, "write again", why};
    for (const uint32_t index : entries) resolve(index, &error, false);  // both ends have closed the link
  };
  const auto any_given_up = [&](const std::vector<uint32_t>& entries) {
    return std::any_of(entries.begin(), entries.end(),
                       [&](uint32_t index) { return given_up(*slab_[index].transfer); });
  };
  for (auto& [transfer, entries] : uncounted) {
    if (any_given_up(entries)) {
      fail_all(entries, ErrorCode::kCancelled, "given up while its link was broken");
    } else {
      rewrite(std::move(entries), std::nullopt, 0);
    }
  }
  for (auto& [counter, entries] : counted) {
    uint64_t pages = 0;
    for (const uint32_t index : entries) pages += slab_[index].pages;
    const auto found = std::find_if(landed.begin(), landed.end(),
                                    [counter = counter](const Landed& one) { return one.counter == counter; });
    const std::optional<uint32_t> posted = link.posted.pages(counter);
    const bool refused = std::find(link.refused.begin(), link.refused.end(), counter) != link.refused.end();
    if (found == landed.end() || !found->known || !posted || refused) {
      fail_all(entries, ErrorCode::kPeerDown, "a link broke, and it is not known what of this counter it had carried");
      continue;
    }
    const uint32_t missing = (*posted - found->pages) % LinkTally::kModulus;
    if (missing == 0) {
      for (const uint32_t index : entries) resolve(index, nullptr, false);
    } else if (missing > pages) {
      fail_all(entries, ErrorCode::kPeerDown, "a link broke, and the peer has counted less than had arrived there");
    } else if (found->released) {
      fail_all(entries, ErrorCode::kRefused, "a link broke, and the peer has released the counter since");
    } else if (any_given_up(entries)) {
      fail_all(entries, ErrorCode::kCancelled,
               "a transfer with the same counter was given up while its link was broken");
    } else {
      rewrite(std::move(entries), counter, missing);
    }
  }
}

// Writes the pages of `entries` again, uncounted, then raises `counter` by what is missing: which of them have landed
// is not known, so none may be counted before all of them are there.
void TransferScheduler::rewrite(std::vector<uint32_t> entries, std::optional<uint32_t> counter, uint32_t missing) {
  auto recovery = std::make_shared<Transfer>(0, slab_[entries.front()].transfer->peer, EventCallback{});
  recovery->sealed = true;
  Rewrite again;
  for (const uint32_t index : entries) {
    const InFlight& entry = slab_[index];
    if (entry.bytes > 0) again.batches.push_back({entry.request, entry.position, entry.pages});
    Stats::add(stats_.pages_rewritten, entry.source == nullptr ? 0 : entry.pages);
  }
  recovery->recovers = std::move(entries);
  if (again.batches.empty()) {  // immediates alone
    recovery->ready.push_back(std::make_shared<Request>(nullptr, nullptr, 0, counter, ImmediateOnly{missing}));
  } else {
    auto request = std::make_shared<Request>(nullptr, nullptr, 0, counter, std::move(again));
    request->count_at_end(missing);
    recovery->ready.push_back(std::move(request));
  }
  recoveries_.push_back(recovery);
  make_runnable(*recovery, true);  // others may wait for it, and it has waited
}

// Nothing more of it may be posted, under whatever broken links.
bool TransferScheduler::given_up(const Transfer& transfer) const {
  return transfer.stopping() || std::any_of(transfer.recovers.begin(), transfer.recovers.end(),
                                            [&](uint32_t index) { return given_up(*slab_[index].transfer); });
}

void TransferScheduler::finish_recovery(Transfer& recovery) {
  recovery.ended = true;
  const std::optional<Error>& error = recovery.error;
  for (const uint32_t index : std::exchange(recovery.recovers, {})) {
    resolve(index, error ? &*error : nullptr, !recovery.quiesced);
  }
  std::erase_if(recoveries_, [&](const auto& other) { return other.get() == &recovery; });
}

// --- The end of transfers

bool TransferScheduler::settle() {
  bool any = false;
  // Callbacks may not post or complete anything here, but ending one transfer can touch another.
  while (!touched_.empty() || !fired_.empty()) {
    any = true;
    for (const std::shared_ptr<Transfer>& transfer : std::exchange(touched_, {})) {
      transfer->touched = false;
      if (transfer->ended) continue;
      if (transfer->stopping()) drop_pending(*transfer);
      const bool all_posted = transfer->sealed && transfer->ready.empty() && transfer->armed_plans == 0;
      if (transfer->batches_in_flight == 0 && (transfer->stopping() || all_posted)) finish(*transfer);
    }
    for (CounterSets::Fired& set : std::exchange(fired_, {})) {
      Event event{.kind = EventKind::kCountersReached, .id = set.id};
      // Released since its last counter was reached: nobody wants to know any more.
      const auto wanted = [&] { return counters_.exists(set.id); };
      if (!set.callback) {
        events_.push_if(std::move(event), wanted);
      } else if (wanted()) {
        call(set.callback, event);
      }
    }
  }
  return any;
}

void TransferScheduler::release(size_t count) {
  const auto end = retired_.begin() + static_cast<ptrdiff_t>(count);
  const std::vector<std::shared_ptr<const void>> released(std::make_move_iterator(retired_.begin()),
                                                          std::make_move_iterator(end));
  retired_.erase(retired_.begin(), end);
}

void TransferScheduler::finish(Transfer& transfer) {
  drop_pending(transfer);  // it may stand in its peer's queue with nothing left to post
  if (!transfer.recovers.empty()) return finish_recovery(transfer);
  transfer.ended = true;
  Event event{.kind = EventKind::kTransferDone,
              .id = transfer.id,
              .quiesced = transfer.quiesced,
              .pages = transfer.progress.pages_done.load(std::memory_order_relaxed),
              .bytes = transfer.progress.bytes_done.load(std::memory_order_relaxed),
              .error = transfer.error};
  if (transfer.cancelled) {
    event.kind = EventKind::kTransferCancelled;
  } else if (transfer.error) {
    event.kind = EventKind::kTransferFailed;
  }
  const auto forget = [&] {
    retire(transfers_.erase(transfer.id));
    return true;
  };
  if (!transfer.callback) {
    events_.push_if(std::move(event), forget);
  } else {
    forget();
    call(transfer.callback, event);
  }
}

void TransferScheduler::call(const EventCallback& callback, const Event& event) noexcept {
  try {
    callback(event);
  } catch (...) {
    // No callback can stop the engine: what it threw is its own affair, and stats() tells that it did.
    Stats::add(stats_.callback_errors, 1);
  }
}

void TransferScheduler::make_runnable(Transfer& transfer, bool first) {
  Peer& peer = *transfer.peer;
  if (!transfer.runnable) {
    transfer.runnable = true;
    first ? peer.runnable.push_front(&transfer) : peer.runnable.push_back(&transfer);
  }
  if (!peer.scheduled) {
    peer.scheduled = true;
    active_.push_back(&peer);
  }
}

void TransferScheduler::record(Transfer& transfer, Error error) {
  if (transfer.error) return;
  if (error.peer.empty()) error.peer = transfer.peer->name;
  if (error.provider.empty()) error.provider = transfer.peer->provider;
  transfer.error = std::move(error);
}

void TransferScheduler::fail(Transfer& transfer, Error error) {
  record(transfer, std::move(error));
  touch(transfer);
}

void TransferScheduler::drop_pending(Transfer& transfer) {
  transfer.ready.clear();
  if (transfer.armed_plans > 0) {
    std::erase_if(armed_, [&](const ArmedPlan& plan) { return plan.transfer.get() == &transfer; });
    transfer.armed_plans = 0;
  }
  if (transfer.runnable) {
    std::erase(transfer.peer->runnable, &transfer);
    transfer.runnable = false;
  }
}

void TransferScheduler::touch(Transfer& transfer) {
  if (transfer.touched || transfer.ended) return;
  transfer.touched = true;
  touched_.push_back(transfer.shared_from_this());
}

}  // namespace kvc
