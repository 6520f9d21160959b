#include "engine/transfer_scheduler.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <utility>

#include "engine/trace.h"

namespace kvc {

namespace {

// True if the receiver has refused the batch, or the sender never sent it: none of its pages can land later. After any
// other error they may.
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

TransferScheduler::TransferScheduler(Registry<Transfer>& transfers, const CounterSets& counters, EventQueue& events,
                                     Stats& stats, uint32_t first_generation)
    : transfers_(transfers),
      stats_(stats),
      flights_(first_generation),
      poster_(flights_, stats, *this),
      rewriter_(
          flights_, stats,
          [this](uint32_t place, const Error* error, bool may_land) { resolve(place, error, may_land); },
          // Before the other streams: they may depend on the recovery, and it has waited already.
          [this](Stream& recovery) { poster_.make_runnable(recovery, true); }),
      endings_(transfers, counters, events, stats) {}

// --- Commands

void TransferScheduler::add(Transfer& transfer, RequestRef request) {
  Stream& stream = transfer.stream;
  if (stream.ended || stream.stopping() || request->done()) return;
  if (stream.peer->down) return fail(stream, *stream.peer->down);
  stream.ready.push_back(std::move(request));
  poster_.make_runnable(stream);
}

void TransferScheduler::arm(ArmedPlan plan) {
  Stream& stream = plan.transfer->stream;
  if (stream.ended || stream.stopping()) return;
  if (stream.peer->down) return fail(stream, *stream.peer->down);
  for (const ArmedPlan::Item& item : plan.items) {
    if (item.request->released_by != 0) ++plan.transfer->stream.undrained[item.signal_value];
  }
  armed_.add(std::move(plan));
}

void TransferScheduler::seal(Transfer& transfer) {
  transfer.stream.sealed = true;
  endings_.touch(transfer.stream);
}

void TransferScheduler::cancel(Transfer& transfer) {
  transfer.stream.cancelled = true;
  drop_pending(transfer.stream);
  endings_.touch(transfer.stream);
}

void TransferScheduler::fail_peer(Peer& peer, const Error& error) {
  if (!peer.down) peer.down = error;
  const auto to_it = [&](const Transfer& transfer) { return transfer.peer.get() == &peer; };
  for (const std::shared_ptr<Transfer>& transfer : transfers_.all_if(to_it)) {
    // A stream that may end is complete, although its end was not reported yet: its last completion came before the
    // peer's end.
    if (!transfer->stream.may_end()) fail(transfer->stream, error);
  }
  for (Recovery* const recovery : rewriter_.of(peer)) fail(*recovery, error);
  // The remaining streams in its queue are parts of scatters.
  while (!peer.runnable.empty()) {
    Stream& stream = *peer.runnable.pop_front();
    stream.runnable = false;
    fail(stream, error);
  }
  // Entries that waited for a settlement. Their pages may land as long as the links are not fenced.
  for (Link& link : peer.links) {
    for (const uint32_t place : std::exchange(link.unsettled, {})) resolve(place, &error, true);
  }
  std::erase(wanting_, &peer);
  // The peer ends with its links, so the poster must not find it any more.
  poster_.forget(peer);
}

// --- The turn of the transfer thread

bool TransferScheduler::post_due_layers() {
  return armed_.release([this](Stream& stream, uint64_t value, RequestRef request) {
    if (stream.stopping()) return;  // settle() drops the other requests
    if (stats_.trace != nullptr) {
      stats_.trace->note({.kind = TraceStep::Kind::kReleased,
                          .request = reinterpret_cast<uint64_t>(request.get()),
                          .transfer = static_cast<Transfer::OwnStream&>(stream).transfer.id,
                          .signal_value = value,
                          .source = reinterpret_cast<uint64_t>(request->first_source())});
    }
    stream.ready.push_back(std::move(request));
    poster_.make_runnable(stream);
  });
}

void TransferScheduler::wants_links(Peer& peer) {
  peer.resting = false;
  wanting_.push_back(&peer);
}

void TransferScheduler::drop_pending(Stream& stream) {
  stream.ready.clear();
  armed_.drop(stream);
  poster_.remove(stream);
}

bool TransferScheduler::settle() {
  return endings_.settle([this](Stream& stream) { look(stream); });
}

void TransferScheduler::look(Stream& stream) {
  if (stream.stopping()) drop_pending(stream);
  if (!stream.may_end()) return;
  poster_.remove(stream);  // it may be in its peer's queue with nothing left to post
  switch (stream.kind) {
    case Stream::Kind::kTransfer:
      return endings_.end(static_cast<Transfer::OwnStream&>(stream).transfer);
    case Stream::Kind::kScatterPart:
      return ScatterRun::of(stream).end(stream, endings_);
    case Stream::Kind::kRecovery:
      return rewriter_.end(static_cast<Recovery&>(stream));
  }
}

// --- Completion

TransferScheduler::Ended TransferScheduler::complete(WorkId work, const Error* error) {
  const std::optional<uint32_t> place = flights_.find(work);
  assert(place && "a domain completed what is not in flight");
  if (!place) return {};
  flights_.leave_link(*place);
  Flight& flight = flights_[*place];
  if (flight.stream == nullptr) {  // an internal message: its sender repeats it
    return {.goodbye_to = flights_.end(*place).goodbye_to};
  }
  Peer& peer = *flight.stream->peer;
  if (error != nullptr && error->code == ErrorCode::kUnknownRegion) {
    std::array<PageWrite, Immediate::kMaxMultiplicity> pages;
    const Request::Batch batch = flight.request->batch(flight.position, pages, peer.limits.batch_bytes);
    if (batch.target != nullptr) batch.target->refused = true;
  }
  if (error != nullptr && peer.links.size() > 1 && !peer.down && !leaves_nothing_behind(error->code)) {
    flight.link->unsettled.push_back(*place);
    if (flight.message) ++peer.unsettled_messages;
    flight.waits = true;
    return {&peer, flight.link};
  }
  resolve(*place, error, error != nullptr && !leaves_nothing_behind(error->code));
  return {};
}

// Ends an entry that is off its link already. `may_land`: its pages may still land at the peer.
void TransferScheduler::resolve(uint32_t place, const Error* error, bool may_land) {
  const Flight flight = flights_.end(place);
  Stream& stream = *flight.stream;
  Request& request = *flight.request;
  if (flight.waits && flight.message) --stream.peer->unsettled_messages;
  --stream.batches_in_flight;
  --request.in_flight;
  if (error == nullptr) {
    // A rewritten page was counted as written when it was posted first, or will be.
    if (flight.source != nullptr && stream.progress != nullptr) {
      const uint64_t pages = request.in_parts() ? 0 : flight.pages;
      Stats::add(stream.progress->pages_done, pages);
      Stats::add(stream.progress->bytes_done, flight.bytes);
      Stats::add(stats_.pages_written, pages);
      Stats::add(stats_.bytes_written, flight.bytes);
      if (stats_.trace != nullptr) {
        stats_.trace->note(
            {.kind = TraceStep::Kind::kLanded, .request = reinterpret_cast<uint64_t>(&request), .pages = flight.pages});
      }
    }
    if (request.in_flight == 0 && request.done()) finish_request(stream, request);
  } else {
    if (may_land) stream.quiesced = false;
    if (flight.counter() && stream.peer->links.size() > 1) flight.link->refused.insert(*flight.counter());
    Endings::record(stream, *error);
  }
  // An open stream does not end here, so it is not put on the list.
  const bool may_end = stream.batches_in_flight == 0 && (stream.sealed || stream.stopping());
  if (may_end || error != nullptr) endings_.touch(stream);
}

// Called when all batches of a request have completed.
void TransferScheduler::finish_request(Stream& stream, const Request& request) {
  // A write in parts is one page, and done when it is counted. If it is cancelled before, its pages match its count.
  const bool whole = request.in_parts() ? request.pages_at_end() == 0 : request.ends_parts();
  if (whole && !stream.error) {
    Stats::add(stream.progress->pages_done, 1);
    Stats::add(stats_.pages_written, 1);
  }
  if (stream.stopping()) return;
  if (request.released_by != 0) {
    auto& own = static_cast<Transfer::OwnStream&>(stream);
    const auto left = own.undrained.find(request.released_by - 1);
    if (--left->second == 0) own.undrained.erase(left);
    own.transfer.armed_slices.fetch_sub(1, std::memory_order_relaxed);
  }
  if (request.pages_at_end() == 0) return;
  // For a part of a scatter this was not reported before, if all of it was in flight.
  if (stream.peer->down) return fail(stream, *stream.peer->down);
  stream.ready.push_front(Request::make(nullptr, nullptr, 0, request.immediate(),
                                        ImmediateOnly{request.pages_at_end(), request.in_parts()}));
  poster_.make_runnable(stream);
}

}  // namespace kvc
