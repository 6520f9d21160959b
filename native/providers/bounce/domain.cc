#include "providers/bounce/domain.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <utility>

#include "lane/immediate.h"
#include "providers/bounce/errors.h"

namespace kvc::bounce {

namespace {

using Clock = std::chrono::steady_clock;

// Batches that may wait in a link for a slot. The transfer engine's window holds no more batches of a slot's size.
constexpr size_t kQueueDepth = 64;
// Bytes that the processor copies in one turn: one slot, which takes 100 us.
constexpr uint64_t kTurnBytes = kSlotBytes;
// A fenced link waits this long for the peer to receive the outcome of its slots. The peer reads the outcome in its next
// turn. On a busy machine that turn can be late. A link does not wait for a peer that disconnected.
constexpr auto kLastWord = std::chrono::milliseconds(50);

// Works of the lower lane: a slot's contains the pool slot, a note's the link, and a message's its key in `messages_`.
constexpr WorkId kKindBits = WorkId{3} << 62;
constexpr WorkId kMessageWork = WorkId{0} << 62;
constexpr WorkId kSlotWork = WorkId{1} << 62;
constexpr WorkId kNoteWork = WorkId{2} << 62;

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

Error nonsense(std::string message) {
  return bounce_error(ErrorCode::kPeerDown, "receive", "the peer " + std::move(message));
}

void break_link(Link& link, Error error) {
  if (!link.broken) link.broken = std::move(error);
}

}  // namespace

BounceDomain::BounceDomain(std::unique_ptr<Domain> below, const SlotMemory& pool, ControlQueue& control)
    : control_(control), pool_(pool), pool_free_(kPoolSlots), below_(std::move(below)) {
  std::iota(pool_free_.rbegin(), pool_free_.rend(), 0U);
}

BounceDomain::~BounceDomain() {
  below_.reset();
  for (const auto& [id, link] : links_) ended_.push_back(link->memory);
  links_.clear();
  // The GPU may still copy out of slots and into them.
  control_.run([copier = copies_.copier(), slots = std::move(ended_)]() mutable {
    if (copier != nullptr) copier->wait();
    slots.clear();
  });
}

// --- Memory and links

void BounceDomain::publish(Registration& registration) {
  regions_.add(registration);
  if (const auto& copier = static_cast<Region&>(registration).copier; copier != nullptr) copies_.open(copier);
}

Link* BounceDomain::find(LinkId link) noexcept {
  const auto found = links_.find(link);
  return found == links_.end() ? nullptr : found->second.get();
}

void BounceDomain::attach(LinkId id, std::unique_ptr<LinkEnd> end) {
  auto& slots = static_cast<LinkSlots&>(*end);
  links_.emplace(id, std::make_unique<Link>(id, slots));
  below_->publish(slots.memory->registration());
  below_->attach(id, std::move(slots.below));
}

bool BounceDomain::fence(LinkId id) {
  Link* const link = find(id);
  if (link == nullptr) return true;
  if (!link->closed) link->closed = bounce_error(ErrorCode::kPeerDown, "fence", "the link was fenced on this side");
  if (link->flying > 0 || !heard_out(*link)) return false;
  const bool fenced = below_->fence(id);
  take_from_below();
  if (fenced) forget(*link);
  return fenced;
}

// Whether the fence may stop waiting. It may if the peer has received the outcome of all its slots, if the lower lane
// is broken, or if the time is over.
bool BounceDomain::heard_out(Link& link) {
  while (!link.broken && !link.notes.empty() && tell(link)) {
  }
  if (link.broken || (link.notes.empty() && link.untold == 0)) return true;
  if (!link.last_word) link.last_word = Clock::now() + kLastWord;
  return Clock::now() > *link.last_word;
}

// Completes the batches for which the transfer engine waits: their sources are not read any more.
void BounceDomain::forget(Link& link) {
  for (const std::optional<Outgoing>& out : link.out) {
    if (out && !out->posted) pool_free_.push_back(out->pool_slot);  // otherwise the lower lane has given it back
  }
  for (const auto& [key, batch] : link.batches) completions_.failed(batch.work, batch.error.value_or(*link.closed));
  ended_.push_back(link.memory);
  links_.erase(link.id);
}

// --- Sending

Posted BounceDomain::post(LinkId id, const WriteBatch& batch) {
  Link* const link = find(id);
  if (link == nullptr || link->closed) {
    return refuse(batch.work, link != nullptr
                                  ? *link->closed
                                  : bounce_error(ErrorCode::kPeerDown, "post", "no such link, or it was fenced"));
  }
  if (link->queue.size() >= kQueueDepth) return Posted::kBusy;
  const auto* const source = static_cast<const Region*>(batch.source);
  const uint64_t key = ++next_id_;
  link->batches.emplace(key, Batch{.work = batch.work,
                                   .rkey = batch.rkey,
                                   .page_bytes = batch.page_bytes,
                                   .counted = batch.counted,
                                   .in_gpu = source != nullptr && source->in_gpu(),
                                   .immediate = batch.immediate,
                                   .pages = {batch.pages.begin(), batch.pages.end()}});
  link->queue.push_back(key);
  return Posted::kYes;
}

// Whether a slot can be filled now.
bool BounceDomain::may_gather(const Link& link) const noexcept {
  if (link.closed || link.queue.empty() || pool_free_.empty()) return false;
  if (std::all_of(link.out.begin(), link.out.end(), [](const auto& out) { return out.has_value(); })) return false;
  const Batch& batch = link.batches.at(link.queue.front());
  if (batch.in_gpu && batch.page_bytes > 0 && !copies_.can_begin()) return false;
  // The last piece of a page that is larger than a slot counts the page. It leaves after all other pieces are in place.
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
  pool_use_[place] = {link.id, slot};
  Outgoing& out =
      link.out[slot].emplace(Outgoing{.batch = key, .pool_slot = place, .bytes = kHeaderBytes + count * piece});
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
  std::memcpy(pool_.slot(place), &header, sizeof(header));

  if (piece > 0 && batch.in_gpu) {
    cuda::Copier& copier = *copies_.copier();
    copier.begin(piece);
    for (size_t i = 0; i < count; ++i) {
      copier.add(reinterpret_cast<uint64_t>(pages[i].source) + from, pool_.pieces_on_device(place) + i * piece);
    }
    Flight flight{true, link.id, slot};
    copies_.launch({&flight, 1});
    ++link.flying;
    return;
  }
  for (size_t i = 0; i < count && piece > 0; ++i) {
    std::memcpy(pool_.slot(place) + kHeaderBytes + i * piece, pages[i].source + from, piece);
  }
  copied_ += count * piece;
  out.gathered = true;
  write_out(link, slot);
}

// Posts a gathered slot on the lower lane. Returns false if that has no room.
bool BounceDomain::write_out(Link& link, uint32_t slot) {
  Outgoing& out = *link.out[slot];
  const PageWrite page{pool_.slot(out.pool_slot), slot * kSlotStride};
  out.posted = below_->post(link.id, {.work = kSlotWork | out.pool_slot,
                                      .source = &pool_.registration(),
                                      .rkey = link.peer_rkey,
                                      .target_base = link.peer_base,
                                      .page_bytes = out.bytes,
                                      .counted = true,
                                      .immediate = Note{.emptied = false, .slot = slot}.encode(),
                                      .pages = {&page, 1}}) == Posted::kYes;
  return out.posted;
}

// Frees the slot once it is written here and emptied at the peer.
void BounceDomain::pass(Link& link, uint32_t slot) {
  const Outgoing out = *link.out[slot];
  if (!out.written || !out.emptied) return;
  link.out[slot].reset();
  Batch& batch = link.batches.at(out.batch);
  --batch.under_way;
  if (out.outcome != Outcome::kInPlace && !batch.error) {
    batch.error = outcome_error(out.outcome);
    if (!batch.all_taken()) {
      std::erase(link.queue, out.batch);
      batch.next_page = batch.pages.size();
    }
  }
  if (batch.under_way > 0 || !batch.all_taken()) return;
  if (batch.error) {
    completions_.failed(batch.work, std::move(*batch.error));
  } else {
    completions_.done(batch.work);
  }
  link.batches.erase(out.batch);
}

Posted BounceDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  const Link* const link = find(id);
  if (link == nullptr || link->closed) {
    return refuse(work, bounce_error(ErrorCode::kPeerDown, "send", "no such link, or it was fenced"));
  }
  const WorkId own = kMessageWork | ++next_id_;
  const Posted posted = below_->send(id, own, message);
  if (posted == Posted::kYes) messages_.emplace(own, work);
  return posted;
}

void BounceDomain::take(LinkId id, uint32_t slot) {
  if (find(id) != nullptr) below_->take(id, slot);
}

// --- Completions of the lower lane

bool BounceDomain::take_from_below() {
  return below_->completions().drain([this](Completion& completion) {
    if (completion.kind == Completion::Kind::kWork) return on_work(completion.work(), completion.error());
    Link* const link = find(completion.link);
    if (link == nullptr) return;
    if (completion.kind == Completion::Kind::kImmediate) {
      on_immediate(*link, completion.immediate());
    } else if (completion.kind == Completion::Kind::kMessage) {
      completions_.put(std::move(completion));
    } else {
      break_link(*link, renamed(*completion.error()));
    }
  });
}

void BounceDomain::on_work(WorkId work, const Error* error) {
  if ((work & kKindBits) == kMessageWork) {
    const auto message = messages_.extract(work);
    if (error != nullptr) return completions_.failed(message.mapped(), renamed(*error));
    return completions_.done(message.mapped());
  }
  const auto carried = static_cast<uint32_t>(work & ~kKindBits);
  const bool slot = (work & kKindBits) == kSlotWork;
  Link& link = *find(slot ? pool_use_[carried].link : carried);  // a link stays until its works have completed
  // It is unknown whether the peer has that slot or note, so the link cannot go on.
  if (error != nullptr) break_link(link, renamed(*error));
  if (!slot) {
    --link.untold;
    return;
  }
  pool_free_.push_back(carried);
  link.out[pool_use_[carried].slot]->written = true;
  if (error == nullptr) pass(link, pool_use_[carried].slot);
}

void BounceDomain::on_immediate(Link& link, uint32_t immediate) {
  const std::optional<Note> note = Note::decode(immediate);
  if (!note) return break_link(link, nonsense("wrote a note of an unknown kind"));
  if (!note->emptied) {
    if (link.arrivals[note->slot]) return break_link(link, nonsense("filled a slot that was not empty"));
    link.arrivals[note->slot].emplace();
    link.full.push_back(note->slot);
    return;
  }
  std::optional<Outgoing>& out = link.out[note->slot];
  if (!out || !out->posted || out->emptied) return break_link(link, nonsense("emptied a slot that was not filled"));
  out->emptied = true;
  out->outcome = note->outcome;
  pass(link, note->slot);
}

// --- Receiving

// Whether these pieces may be copied to the offsets that the peer requests.
Outcome BounceDomain::judge(const SlotHeader& header, Region*& region) const {
  region = static_cast<Region*>(regions_.find(header.rkey));
  if (region == nullptr) return Outcome::kUnknownRegion;
  const bool inside = std::all_of(header.offsets, header.offsets + header.pieces,
                                  [&](uint64_t offset) { return region->contains(offset, header.piece_bytes); });
  return inside ? Outcome::kInPlace : Outcome::kOutOfRange;
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
    return break_link(link, nonsense("wrote a malformed slot"));
  }
  Arrival& arrival = *link.arrivals[slot];
  arrival.counted = header.counted != 0;
  arrival.immediate = header.immediate;
  Outcome outcome = Outcome::kInPlace;
  if (header.piece_bytes > 0) outcome = judge(header, arrival.region);
  if (outcome != Outcome::kInPlace || header.piece_bytes == 0) return scattered(link, slot, outcome);
  Region& region = *arrival.region;
  if (!region.in_gpu()) {
    const std::byte* pieces = link.memory->slot(slot) + kHeaderBytes;
    for (uint32_t i = 0; i < header.pieces; ++i) {
      std::memcpy(region.base + header.offsets[i], pieces + i * header.piece_bytes, header.piece_bytes);
    }
    copied_ += header.pieces * header.piece_bytes;
    return scattered(link, slot, outcome);
  }
  cuda::Copier& copier = *copies_.copier();
  copier.begin(header.piece_bytes);
  for (uint32_t i = 0; i < header.pieces; ++i) {
    copier.add(link.memory->pieces_on_device(slot) + i * header.piece_bytes,
               reinterpret_cast<uint64_t>(region.base) + header.offsets[i]);
  }
  Flight flight{false, link.id, slot};
  copies_.launch({&flight, 1});
  ++region.landing;
  ++link.flying;
}

// Ends a slot whose pieces are in place, or never will be.
void BounceDomain::scattered(Link& link, uint32_t slot, Outcome outcome) {
  const Arrival arrival = *link.arrivals[slot];
  link.arrivals[slot].reset();
  if (outcome == Outcome::kInPlace && arrival.counted) completions_.immediate(link.id, arrival.immediate);
  link.notes.push_back({.emptied = true, .slot = slot, .outcome = outcome});
}

// Sends the note that a slot is empty. Returns false if the lower lane has no room.
bool BounceDomain::tell(Link& link) {
  const PageWrite none{};
  if (below_->post(link.id, {.work = kNoteWork | link.id,
                             .counted = true,
                             .immediate = link.notes.front().encode(),
                             .pages = {&none, 1}}) != Posted::kYes) {
    return false;
  }
  link.notes.pop_front();
  ++link.untold;
  return true;
}

// --- The thread's turn

bool BounceDomain::poll() {
  bool any = below_->poll();
  any |= take_from_below();
  any |= settle();
  copied_ = 0;
  // Begins behind the link that was served first last time, so that every link has a turn at the pool.
  auto next = links_.upper_bound(last_served_);
  for (size_t left = links_.size(); left > 0; --left, ++next) {
    if (next == links_.end()) next = links_.begin();
    if (left == links_.size()) last_served_ = next->first;
    any |= serve(*next->second);
  }
  if (!ended_.empty()) {
    const auto gone = std::stable_partition(
        ended_.begin(), ended_.end(), [this](const auto& slots) { return !below_->withdraw(slots->registration()); });
    if (gone != ended_.end()) {
      // Moved, not copied: the control thread must hold the last reference.
      control_.run([slots = std::vector(std::make_move_iterator(gone),
                                        std::make_move_iterator(ended_.end()))]() mutable { slots.clear(); });
      ended_.erase(gone, ended_.end());
    }
  }
  return any;
}

bool BounceDomain::serve(Link& link) {
  if (link.closed) return false;
  if (copies_.dead() != nullptr) break_link(link, renamed(*copies_.dead()));
  if (link.broken) {
    link.closed = link.broken;
    completions_.link_down(link.id, *link.closed);
    return true;
  }
  bool any = false;
  while (!link.broken && !link.full.empty() && copied_ < kTurnBytes &&
         (copies_.copier() == nullptr || copies_.can_begin())) {
    scatter(link);
    any = true;
  }
  while (!link.broken && !link.notes.empty() && tell(link)) any = true;
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    if (link.out[slot] && link.out[slot]->gathered && !link.out[slot]->posted) any |= write_out(link, slot);
  }
  while (copied_ < kTurnBytes && may_gather(link)) {
    gather(link);
    any = true;
  }
  return any;
}

// Ends the copies that the GPU has finished.
bool BounceDomain::settle() {
  return copies_.settle([this](const Flight& flight, const Error* failed) {
    Link& link = *links_.at(flight.link);  // a link stays as long as it has copies
    --link.flying;
    if (flight.outgoing) {
      // gathered as far as it ever will be: if the copy failed, every link ends
      link.out[flight.slot]->gathered = true;
      if (failed == nullptr && !link.closed) write_out(link, flight.slot);
      return;
    }
    --link.arrivals[flight.slot]->region->landing;
    scattered(link, flight.slot, failed == nullptr ? Outcome::kInPlace : Outcome::kFailed);
  });
}

bool BounceDomain::prepare_sleep() {
  // The GPU sends no wake-up. While it copies, the thread keeps polling. If only the lower lane is awaited, that lane
  // wakes the thread.
  if (!copies_.idle() || !below_->completions().empty()) return false;
  for (const auto& [id, link] : links_) {
    if (!link->closed && (link->broken || !link->full.empty() || may_gather(*link))) return false;
  }
  return below_->prepare_sleep();
}

}  // namespace kvc::bounce
