#include "engine/poster.h"

#include <algorithm>
#include <utility>

#include "engine/trace.h"
#include "lane/immediate.h"

namespace kvc {

namespace {

// Batches that a stream posts before the next stream of its peer, and batches that a peer posts before the next peer.
// Small enough that completions and commands are handled every few tens of microseconds.
constexpr uint32_t kStreamQuantum = 4;
constexpr uint32_t kPeerQuantum = 16;

// Length of the parts of a single write that is split over links. After the parts have completed, a separate immediate
// counts the write. That takes one more round trip, 10 us with events on both sides, in which a link of 50 GB/s (400G)
// carries 512 KiB. From twice that length on, two links gain what the round trip costs, and more on slower links.
constexpr uint64_t kPartBytes = 512 << 10;
// Least number of parts per link for a large write, so that unequal links end at about the same time.
constexpr uint64_t kPartsPerLink = 4;
constexpr uint64_t kPartAlignment = 4096;  // a page of memory: no two links write into the same one

// The least that a page takes of a link's window: a work request and its share of a header. It bounds the pages in
// flight on a link, on which LinkTally relies.
constexpr uint64_t kLeastCharge = 256;
static_assert((uint64_t{128} << 20) / kLeastCharge < LinkTally::kModulus / 2);

// User messages in flight on a link: half of the room that every domain has. Internal messages therefore always find
// room, also if the peer does not read.
constexpr uint32_t kMessageWindow = kMessageSlots / 2;

inline bool has_room(const Link& link, bool message, uint64_t charge, const DomainLimits& limits) {
  return message ? link.messages_in_flight < kMessageWindow
                 : link.bytes_in_flight == 0 || link.bytes_in_flight + charge <= limits.window_bytes;
}

}  // namespace

void Poster::make_runnable(Stream& stream, bool first) {
  Peer& peer = *stream.peer;
  if (!std::exchange(stream.runnable, true)) {
    first ? peer.runnable.push_front(stream) : peer.runnable.push_back(stream);
  }
  if (!std::exchange(peer.scheduled, true)) active_.push_back(&peer);
}

void Poster::start(Stream& stream) {
  uint32_t posted = 0;
  if (stream.peer->scheduled || post_turn(stream, posted) != Outcome::kNothing) make_runnable(stream);
}

void Poster::remove(Stream& stream) {
  if (std::exchange(stream.runnable, false)) stream.peer->runnable.erase(stream);
}

void Poster::forget(Peer& peer) {
  std::erase(active_, &peer);
  peer.scheduled = false;
}

bool Poster::post() {
  bool any = false;
  for (size_t i = 0; i < active_.size();) {
    Peer& peer = *active_[i];
    any |= post_peer(peer);
    if (!peer.runnable.empty()) {
      ++i;
      continue;
    }
    peer.scheduled = false;
    active_[i] = active_.back();
    active_.pop_back();
  }
  return any;
}

bool Poster::post_peer(Peer& peer) {
  uint32_t posted = 0;
  bool blocked = false;
  IntrusiveList<Stream, &Stream::hook> waiting;
  while (!blocked && posted < kPeerQuantum && !peer.runnable.empty()) {
    Stream& stream = *peer.runnable.front();
    uint32_t turn = 0;
    const Outcome outcome = post_turn(stream, turn);
    posted += turn;
    blocked = outcome == Outcome::kBlocked;
    if (outcome == Outcome::kNothing) {
      peer.runnable.pop_front();
      stream.runnable = false;
    } else if (outcome == Outcome::kWaits) {
      peer.runnable.pop_front();
      waiting.push_back(stream);  // for the next turn: for example, unread messages must not stop writes
    } else if (turn > 0 && IntrusiveList<Stream, &Stream::hook>::after(stream) != nullptr) {
      // It had its turn. A stream that could not post anything keeps its place at the front.
      peer.runnable.pop_front();
      peer.runnable.push_back(stream);
    }
  }
  peer.runnable.append(waiting);
  return posted > 0;
}

Poster::Outcome Poster::post_turn(Stream& stream, uint32_t& posted) {
  while (posted < kStreamQuantum) {
    if (const Outcome outcome = post_batch(stream); outcome != Outcome::kPosted) return outcome;
    ++posted;
    if (stream.ready.empty()) return Outcome::kNothing;
  }
  return Outcome::kPosted;
}

inline Link* Poster::pick_link(Peer& peer, const Request& request, bool message, uint64_t charge, uint32_t tried) {
  if (peer.links.size() > 1) return choose_link(peer, request, message, charge, tried);
  if (peer.links.empty() || tried != 0) return nullptr;
  Link& only = peer.links.front();  // most peers have one link: a third of the instructions of choose_link()
  return only.state == Link::State::kUp && has_room(only, message, charge, peer.limits) ? &only : nullptr;
}

Link* Poster::choose_link(Peer& peer, const Request& request, bool message, uint64_t charge, uint32_t tried) {
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
    if (!has_room(link, message, charge, peer.limits)) continue;
    const double time = static_cast<double>(link.bytes_in_flight + charge) * link.cost;
    if (best == nullptr || time < best_time) {
      best = &link;
      best_time = time;
      chosen = index;
    }
  }
  // Equally good links take turns.
  if (best != nullptr) peer.next_link = chosen + 1 == count ? 0 : chosen + 1;
  return best;
}

Poster::Outcome Poster::post_batch(Stream& stream) {
  if (stream.stopping() || stream.ready.empty()) return Outcome::kNothing;
  if (stream.kind == Stream::Kind::kRecovery && !owner_.may_post(stream)) {
    owner_.fail(
        stream,
        {ErrorCode::kCancelled, {}, {}, "write again", "a transfer on the broken link was cancelled or has failed"});
    return Outcome::kNothing;
  }
  Peer& peer = *stream.peer;
  Request& request = stream.ready.front();
  if (request.position() == 0 && request.splittable() > std::min(kPartBytes, peer.limits.page_bytes)) {
    split(peer, request);
  }

  const Request::Batch batch = request.batch(request.position(), pages_, peer.limits.batch_bytes);
  if (batch.source != nullptr && !batch.source->live.load(std::memory_order_relaxed)) {
    owner_.fail(stream, {ErrorCode::kUnknownRegion, {}, {}, "post", "the source region was deregistered"});
    return Outcome::kNothing;
  }
  if (batch.target != nullptr && batch.target->refused) {
    owner_.fail(stream, {ErrorCode::kUnknownRegion, peer.provider, peer.name, "post",
                         "the peer refused a write to this region: the peer has deregistered the region"});
    return Outcome::kNothing;
  }
  if (batch.page_bytes > peer.limits.page_bytes) {
    owner_.fail(stream, {ErrorCode::kOutOfRange, peer.provider, peer.name, "post",
                         "pages of " + std::to_string(batch.page_bytes) + " bytes exceed the lane's limit of " +
                             std::to_string(peer.limits.page_bytes) + " bytes"});
    return Outcome::kNothing;
  }
  const bool message = batch.message != nullptr;
  if (request.needs_number()) {
    if (peer.unsettled_messages > 0) return Outcome::kWaits;  // required by MessageWindow
    request.number(peer.next_message++);
  }
  WriteBatch wire{.page_bytes = batch.page_bytes, .pages = std::span(pages_).first(batch.pages)};
  if (batch.target != nullptr) wire.target_base = batch.target->base;
  if (request.counted()) {
    wire.counted = true;
    wire.immediate = Immediate::with_multiplicity(*request.immediate(), static_cast<uint32_t>(batch.pages));
  }
  const uint64_t bytes = batch.bytes();
  const uint64_t charge = message ? 0 : std::max(bytes, batch.pages * kLeastCharge);
  if (peer.resting && !message) owner_.wants_links(peer);

  uint32_t tried = 0;
  while (Link* link = pick_link(peer, request, message, charge, tried)) {
    if (batch.target != nullptr) wire.rkey = batch.target->rkeys[link->remote_domain];
    if (batch.source != nullptr) {
      wire.source = batch.source->registrations[link->domain_place].get();
      if (wire.source == nullptr) {
        std::string why = "the lane to this peer does not take the memory of the source region";
        for (const std::string& refusal : batch.source->refusals) why += "; " + refusal;
        owner_.fail(stream, {ErrorCode::kNotReachable, peer.provider, peer.name, "post", std::move(why)});
        return Outcome::kNothing;
      }
    }
    wire.work = flights_.take({.stream = &stream,
                               .request = RequestRef::share(request),
                               .position = request.position(),
                               .pages = static_cast<uint32_t>(batch.pages),
                               .message = message,
                               .bytes = bytes,
                               .charge = charge,
                               .link = link,
                               .source = batch.source});
    const Posted posted =
        message ? link->domain->send(link->id, wire.work, *batch.message) : link->domain->post(link->id, wire);
    if (posted != Posted::kYes) {
      flights_.put_back(wire.work);
      tried |= 1U << (link - peer.links.data());
      continue;
    }
    ++stream.batches_in_flight;
    ++request.in_flight;
    request.advance(batch.steps);
    const bool last = request.done();
    if (wire.counted && peer.links.size() > 1) link->posted.add(wire.immediate);
    if (!message) Stats::add(stats_.batches_posted, 1);
    if (batch.source != nullptr && stream.progress != nullptr) {
      Stats::add(stream.progress->pages_posted, request.in_parts() ? (last ? 1 : 0) : batch.pages);
      Stats::add(stream.progress->bytes_posted, bytes);
      if (stats_.trace != nullptr) {
        stats_.trace->note(
            {.kind = TraceStep::Kind::kPosted, .request = reinterpret_cast<uint64_t>(&request), .pages = batch.pages});
      }
    }
    if (last) stream.ready.pop_front();
    return Outcome::kPosted;
  }
  return message || request.domain() ? Outcome::kWaits : Outcome::kBlocked;
}

// Splits a large write into parts. Over several links, each then carries some of it. Over one link, parts allow
// cancelling, limit the delay of others, and keep the link busy although the write is longer than a window.
void Poster::split(const Peer& peer, Request& request) {
  const uint64_t bytes = request.splittable();
  const auto up = static_cast<uint64_t>(std::count_if(peer.links.begin(), peer.links.end(),
                                                      [](const Link& link) { return link.state == Link::State::kUp; }));
  const bool spread = up > 1 && !request.domain();
  // Unsplit, a write saves a round trip, and two writes of half a window keep a link as busy as parts do.
  const uint64_t most = std::min(peer.limits.page_bytes, peer.limits.window_bytes / 2);
  if (bytes <= most && (!spread || bytes < 2 * kPartBytes)) return;
  uint64_t part = std::max(kPartBytes, peer.limits.batch_bytes);
  if (spread) part = std::clamp(bytes / (kPartsPerLink * up), kPartBytes, part);
  part = std::min((part + kPartAlignment - 1) / kPartAlignment * kPartAlignment, peer.limits.page_bytes);
  request.split(part);
}

bool Poster::send(Peer& peer, std::span<const std::byte> message, Link* only, bool goodbye) {
  for (Link& link : peer.links) {
    if (only != nullptr ? &link != only : link.state != Link::State::kUp) continue;
    const WorkId work = flights_.take({.message = true, .goodbye_to = goodbye ? peer.id : 0, .link = &link});
    if (link.domain->send(link.id, work, message) == Posted::kYes) return true;
    flights_.put_back(work);
  }
  return false;
}

}  // namespace kvc
