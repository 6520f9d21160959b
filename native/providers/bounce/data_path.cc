// BounceDomain's data path: from a batch to the peer's slot, from a slot to its place, and the worker's turn.
#include <algorithm>
#include <cstring>
#include <utility>

#include "providers/bounce/domain.h"
#include "providers/bounce/errors.h"

namespace kvc::bounce {

namespace {

// Batches that wait in a link for a slot: the group's window holds no more of a slot's size.
constexpr size_t kQueueDepth = 64;
// Slots gathered or scattered in a turn: by the CPU one takes 100 us.
constexpr int kSlotsPerTurn = 4;
// How often the GPU is asked for errors while copies are under way: 1 us, and never needed in a life without one.
constexpr uint32_t kTurnsPerCheck = 1024;

Error outcome_error(Outcome outcome) {
  switch (outcome) {
    case Outcome::kUnknownRegion:
      return bounce_error(ErrorCode::kUnknownRegion, "write", "the peer has no region of this key, or has revoked it");
    case Outcome::kOutOfRange:
      return bounce_error(ErrorCode::kOutOfRange, "write", "the pages do not fit the peer's region");
    default:
      return bounce_error(ErrorCode::kPeerDown, "write", "the peer's GPU failed to copy the pages into place");
  }
}

}  // namespace

// --- Sending

Posted BounceDomain::post(LinkId id, const WriteBatch& batch) {
  Link* link = find(id);
  std::optional<Error> error = dead_;
  if (link == nullptr || link->closed) {
    error =
        link != nullptr ? *link->closed : bounce_error(ErrorCode::kPeerDown, "post", "no such link, or it was fenced");
  } else if (batch.pages.empty() || batch.pages.size() > Immediate::kMaxMultiplicity) {
    error = bounce_error(ErrorCode::kInvalidArgument, "post", "a batch has 1 to 64 pages");
  }
  if (error) {
    sink_.on_complete(batch.work, &*error);
    return Posted::kYes;
  }
  if (link->queue.size() >= kQueueDepth) return Posted::kBusy;
  const uint64_t key = next_id_++;
  link->batches.emplace(key, Batch{.work = batch.work,
                                   .rkey = batch.rkey,
                                   .page_bytes = batch.page_bytes,
                                   .counted = batch.counted,
                                   .immediate = batch.immediate,
                                   .pages = {batch.pages.begin(), batch.pages.end()},
                                   .error = {}});
  link->queue.push_back(key);
  return Posted::kYes;
}

// A slot can be filled now.
bool BounceDomain::may_gather(const Link& link) const noexcept {
  if (link.closed || !link.ready || link.queue.empty() || pool_free_.empty()) return false;
  if (std::all_of(link.out.begin(), link.out.end(), [](const auto& out) { return out.has_value(); })) return false;
  if (copier_ != nullptr && !copier_->can_begin()) return false;
  const Batch& batch = link.batches.at(link.queue.front());
  // The last piece of a page that one slot does not hold counts the page: it goes when all others are in place.
  const bool last = batch.page_bytes > kSlotBytes && batch.page_bytes - batch.next_byte <= kSlotBytes;
  return !last || !batch.counted || batch.under_way == 0;
}

// Fills a slot with the next pieces of the link's first batch.
void BounceDomain::gather(Link& link) {
  const uint64_t key = link.queue.front();
  Batch& batch = link.batches.at(key);
  const size_t left = batch.pages.size() - batch.next_page;
  const bool split = batch.page_bytes > kSlotBytes;
  const uint64_t piece = split ? std::min(kSlotBytes, batch.page_bytes - batch.next_byte) : batch.page_bytes;
  const size_t count = split || piece == 0 ? (split ? 1 : left) : std::min<size_t>(left, kSlotBytes / piece);

  const auto slot = static_cast<uint32_t>(
      std::find_if(link.out.begin(), link.out.end(), [](const auto& out) { return !out; }) - link.out.begin());
  const uint32_t place = pool_free_.back();
  pool_free_.pop_back();
  link.out[slot] = Outgoing{.batch = key, .pool_slot = place, .bytes = kHeaderBytes + count * piece};
  ++batch.under_way;

  SlotHeader header{.rkey = batch.rkey, .piece_bytes = piece, .pieces = static_cast<uint32_t>(count)};
  const std::span<const PageWrite> pages = std::span(batch.pages).subspan(batch.next_page, count);
  for (size_t i = 0; i < count; ++i) header.offsets[i] = pages[i].target_offset + batch.next_byte;
  const uint64_t from = batch.next_byte;
  if (split && from + piece < batch.page_bytes) {
    batch.next_byte += piece;
  } else {
    batch.next_byte = 0;
    batch.next_page += count;
    header.counted = batch.counted ? 1 : 0;
    if (batch.counted) {
      header.immediate = Immediate::with_multiplicity(batch.immediate, static_cast<uint32_t>(count));
    }
  }
  if (batch.all_taken()) link.queue.pop_front();
  std::memcpy(pool_->slot(place), &header, sizeof(header));

  if (piece > 0 && copier_ != nullptr && in_gpu(pages[0].source)) {
    copier_->begin(piece);
    for (size_t i = 0; i < count; ++i) {
      copier_->add(reinterpret_cast<uint64_t>(pages[i].source) + from, pool_->pieces_on_device(place) + i * piece);
    }
    if (Status launched = copier_->launch(); !launched) {
      dead_ = renamed(launched.error());  // every link ends with it, at the next turn
      link.out[slot]->gathered = true;    // as far as it ever will be
      return;
    }
    flights_.push_back({copier_->launched(), true, link.id, slot, place});
    return;
  }
  for (size_t i = 0; i < count && piece > 0; ++i) {
    std::memcpy(pool_->slot(place) + kHeaderBytes + i * piece, pages[i].source + from, piece);
  }
  link.out[slot]->gathered = true;
  write_out(link, slot);
}

// Hands a gathered slot to the lane below; false if that has no room.
bool BounceDomain::write_out(Link& link, uint32_t slot) {
  Outgoing& out = *link.out[slot];
  const PageWrite page{pool_->slot(out.pool_slot), slot * kSlotStride};
  const WorkId work = next_id_++;
  works_.emplace(work, Work{Work::Kind::kSlot, link.id, slot, 0});
  out.posted = true;  // before post(): its completion may come from within
  const Posted posted = below_->post(link.id, {.work = work,
                                               .rkey = link.peer_rkey,
                                               .target_base = link.peer_base,
                                               .page_bytes = out.bytes,
                                               .counted = true,
                                               .immediate = Note{.emptied = false, .slot = slot}.encode(),
                                               .pages = {&page, 1}});
  if (posted == Posted::kYes) return true;
  works_.erase(work);
  out.posted = false;
  return false;
}

// The slot is the peer's again once it is written here and emptied there.
void BounceDomain::pass(Link& link, uint32_t slot) {
  const Outgoing out = *link.out[slot];
  if (!out.written || !out.emptied) return;
  link.out[slot].reset();
  const auto found = link.batches.find(out.batch);
  if (found == link.batches.end()) return;
  Batch& batch = found->second;
  --batch.under_way;
  if (out.outcome != Outcome::kInPlace && !batch.error) {
    batch.error = outcome_error(out.outcome);
    if (!batch.all_taken()) {
      std::erase(link.queue, out.batch);
      batch.next_page = batch.pages.size();
    }
  }
  if (batch.under_way == 0 && batch.all_taken()) end_batch(link, out.batch);
}

void BounceDomain::end_batch(Link& link, uint64_t key) {
  const auto node = link.batches.extract(key);  // before the sink may post again
  const Batch& batch = node.mapped();
  sink_.on_complete(batch.work, batch.error ? &*batch.error : nullptr);
}

Posted BounceDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  const Link* link = find(id);
  if (link == nullptr || link->closed) {
    const Error error = bounce_error(ErrorCode::kPeerDown, "send", "no such link, or it was fenced");
    sink_.on_complete(work, &error);
    return Posted::kYes;
  }
  const WorkId own = next_id_++;
  works_.emplace(own, Work{Work::Kind::kMessage, id, 0, work});
  const Posted posted = below_->send(id, own, message);
  if (posted != Posted::kYes) works_.erase(own);
  return posted;
}

void BounceDomain::on_complete(WorkId id, const Error* error) noexcept {
  const auto node = works_.extract(id);
  if (node.empty()) return;
  const Work& work = node.mapped();
  if (work.kind == Work::Kind::kMessage) {
    const std::optional<Error> ours = error != nullptr ? std::optional(renamed(*error)) : std::nullopt;
    sink_.on_complete(work.message, ours ? &*ours : nullptr);
    return;
  }
  Link* link = find(work.link);
  if (link == nullptr) return;
  if (work.kind == Work::Kind::kSlot && link->out[work.slot]) {
    Outgoing& out = *link->out[work.slot];
    pool_free_.push_back(out.pool_slot);
    out.written = true;
    if (error == nullptr) pass(*link, work.slot);
  }
  // Whether the peer has that slot, or that note, nobody knows: the link cannot go on.
  if (error != nullptr && !link->broken) link->broken = renamed(*error);
}

// --- Receiving

void BounceDomain::on_immediate(LinkId id, uint32_t immediate) noexcept {
  Link* link = find(id);
  if (link == nullptr || link->closed) return;
  const std::optional<Note> note = Note::decode(immediate);
  if (!note) {
    link->broken = bounce_error(ErrorCode::kPeerDown, "receive", "the peer wrote a note that means nothing");
  } else if (note->emptied) {
    std::optional<Outgoing>& out = link->out[note->slot];
    if (!out || !out->posted || out->emptied) {
      link->broken = bounce_error(ErrorCode::kPeerDown, "receive", "the peer emptied a slot that was not filled");
      return;
    }
    out->emptied = true;
    out->outcome = note->outcome;
    pass(*link, note->slot);
  } else if (link->arrivals[note->slot]) {
    link->broken = bounce_error(ErrorCode::kPeerDown, "receive", "the peer filled a slot that was not empty");
  } else {
    link->arrivals[note->slot].emplace();
    link->full.push_back(note->slot);
  }
}

bool BounceDomain::on_message(LinkId link, std::span<const std::byte> message) noexcept {
  return sink_.on_message(link, message);
}

// Whether these pieces may go where the peer wants them.
Outcome BounceDomain::judge(const SlotHeader& header) {
  if (header.piece_bytes == 0) return Outcome::kInPlace;
  const auto found = regions_.find(header.rkey);
  if (found == regions_.end() || found->second.revoked) return Outcome::kUnknownRegion;
  const uint64_t bytes = found->second.bytes;
  for (uint32_t i = 0; i < header.pieces; ++i) {
    if (header.piece_bytes > bytes || header.offsets[i] > bytes - header.piece_bytes) return Outcome::kOutOfRange;
  }
  return Outcome::kInPlace;
}

// Empties the link's first full slot.
void BounceDomain::scatter(Link& link) {
  const uint32_t slot = link.full.front();
  link.full.pop_front();
  SlotHeader header;
  std::memcpy(&header, link.memory->slot(slot), sizeof(header));
  if (header.pieces == 0 || header.pieces > Immediate::kMaxMultiplicity || header.piece_bytes > kSlotBytes ||
      header.pieces * header.piece_bytes > kSlotBytes ||
      (header.counted != 0 && Immediate::decode(header.immediate).multiplicity != header.pieces)) {
    link.broken = bounce_error(ErrorCode::kPeerDown, "receive", "the peer wrote a malformed slot");
    return;
  }
  link.arrivals[slot] = Arrival{header.rkey, header.counted != 0, header.immediate};
  const Outcome outcome = judge(header);
  if (outcome != Outcome::kInPlace || header.piece_bytes == 0) {
    scattered(link, slot, outcome);
    return;
  }
  Region& region = regions_.at(header.rkey);
  if (!region.gpu) {
    const std::byte* pieces = link.memory->slot(slot) + kHeaderBytes;
    for (uint32_t i = 0; i < header.pieces; ++i) {
      std::memcpy(region.base + header.offsets[i], pieces + i * header.piece_bytes, header.piece_bytes);
    }
    scattered(link, slot, outcome);
    return;
  }
  copier_->begin(header.piece_bytes);
  for (uint32_t i = 0; i < header.pieces; ++i) {
    copier_->add(link.memory->pieces_on_device(slot) + i * header.piece_bytes,
                 reinterpret_cast<uint64_t>(region.base) + header.offsets[i]);
  }
  if (Status launched = copier_->launch(); !launched) {
    dead_ = renamed(launched.error());
    return;
  }
  ++region.landing;
  ++link.landing;
  flights_.push_back({copier_->launched(), false, link.id, slot, 0});
}

// The slot's pieces are in place, or will never be.
void BounceDomain::scattered(Link& link, uint32_t slot, Outcome outcome) {
  const Arrival arrival = *link.arrivals[slot];
  link.arrivals[slot].reset();
  if (outcome == Outcome::kInPlace && arrival.counted) sink_.on_immediate(link.id, arrival.immediate);
  link.notes.push_back({.emptied = true, .slot = slot, .outcome = outcome});
}

// Says that a slot is empty; false if the lane below has no room.
bool BounceDomain::tell(Link& link, Note note) {
  const WorkId work = next_id_++;
  works_.emplace(work, Work{Work::Kind::kNote, link.id, note.slot, 0});
  const PageWrite none{};
  const Posted posted =
      below_->post(link.id, {.work = work, .counted = true, .immediate = note.encode(), .pages = {&none, 1}});
  if (posted == Posted::kYes) return true;
  works_.erase(work);
  return false;
}

// --- The worker's turn

bool BounceDomain::poll() {
  reap();
  bool any = below_->poll();
  any |= settle();
  // Beginning behind the link that was served first last time, so that everyone has a turn at the pool.
  auto next = links_.upper_bound(last_served_);
  for (size_t left = links_.size(); left > 0 && !links_.empty(); --left, ++next) {
    if (next == links_.end()) next = links_.begin();
    if (left == links_.size()) last_served_ = next->first;
    any |= serve(*next->second);
  }
  if (!flights_.empty() && ++turns_ % kTurnsPerCheck == 0) check_health();
  if (dead_) {
    for (const auto& [id, link] : links_) break_down(*link, *dead_);
  }
  return any;
}

bool BounceDomain::serve(Link& link) {
  if (link.broken && !link.closed) {
    break_down(link, *link.broken);
    return true;
  }
  bool any = false;
  for (int i = 0; i < kSlotsPerTurn && !link.closed && !link.broken && !link.full.empty(); ++i) {
    if (dead_ || (copier_ != nullptr && !copier_->can_begin())) break;
    scatter(link);
    any = true;
  }
  while (!link.closed && link.ready && !link.notes.empty() && tell(link, link.notes.front())) {
    link.notes.pop_front();
    any = true;
  }
  for (uint32_t slot = 0; slot < kSlots && !link.closed; ++slot) {
    if (link.out[slot] && link.out[slot]->gathered && !link.out[slot]->posted) any |= write_out(link, slot);
  }
  for (int i = 0; i < kSlotsPerTurn && !dead_ && may_gather(link); ++i) {
    gather(link);
    any = true;
  }
  return any;
}

// Ends the copies that the GPU has finished.
bool BounceDomain::settle() {
  bool any = false;
  while (!flights_.empty() && (dead_ || copier_->finished() >= flights_.front().launch)) {
    any = true;
    const Flight flight = flights_.front();
    flights_.pop_front();
    Link& link = *links_.at(flight.link);  // links go in reap() only, and not with flights under way
    if (flight.outgoing) {
      if (!link.out[flight.slot]) {
        pool_free_.push_back(flight.pool_slot);  // the link has ended meanwhile
        continue;
      }
      link.out[flight.slot]->gathered = true;
      if (!link.closed && !dead_) write_out(link, flight.slot);
      continue;
    }
    --link.landing;
    if (const auto region = regions_.find(link.arrivals[flight.slot]->rkey); region != regions_.end()) {
      --region->second.landing;
    }
    scattered(link, flight.slot, dead_ ? Outcome::kFailed : Outcome::kInPlace);
  }
  return any;
}

bool BounceDomain::flying(LinkId link) const noexcept {
  return std::any_of(flights_.begin(), flights_.end(), [link](const Flight& flight) { return flight.link == link; });
}

void BounceDomain::check_health() {
  const Status healthy = copier_->health();
  if (!healthy) dead_ = renamed(healthy.error());
}

bool BounceDomain::prepare_sleep() {
  // The GPU wakes nobody: while it copies, the worker keeps looking. What waits for the lane below, that wakes us for.
  if (!flights_.empty()) return false;
  for (const auto& [id, link] : links_) {
    if (link->closed) continue;
    if (dead_ || link->broken || !link->full.empty() || may_gather(*link)) return false;
  }
  return below_->prepare_sleep();
}

}  // namespace kvc::bounce
