#include "engine/scatter.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kvc {

// --- Submission

ScatterRun::ScatterRun(Scatter& of) : scatter_(of), updates_(of.slices_.size()) {
  for (const std::shared_ptr<Peer>& member : of.members_) parts_.emplace_back(*this, *member);
  requests_.reserve(of.slices_.size());
  for (const Scatter::Slice& slice : of.slices_) {
    const bool idle = slice.bytes == 0 && !slice.immediate;
    requests_.push_back(idle ? RequestRef()
                             : Request::make(slice.source, slice.target, slice.bytes, slice.immediate,
                                             SingleWrite{slice.source_offset, slice.target_offset}));
  }
}

void ScatterRun::fill(std::span<const ScatterUpdate> updates) {
  keep_ = scatter_.shared_from_this();
  std::copy(updates.begin(), updates.end(), updates_.begin());
}

void ScatterRun::abandon() {
  const std::shared_ptr<Scatter> scatter = std::move(keep_);  // this run may end with it
  id_.store(0, std::memory_order_release);
  scatter->leave();
}

std::optional<Error> Scatter::check(std::span<const ScatterUpdate> updates) const {
  constexpr const char* kOperation = "submit_scatter";
  if (updates.size() != slices_.size()) {
    return Error{ErrorCode::kInvalidArgument,
                 {},
                 {},
                 kOperation,
                 std::to_string(updates.size()) + " updates for " + std::to_string(slices_.size()) +
                     " slices: give one for each, in their order"};
  }
  for (size_t i = 0; i < updates.size(); ++i) {
    const ScatterUpdate& update = updates[i];
    const uint64_t bytes = slices_[i].bytes;
    if (fits(update.source_offset, update.bytes, bytes) && fits(update.target_offset, update.bytes, bytes)) continue;
    return Error{ErrorCode::kOutOfRange,
                 {},
                 members_[slices_[i].member]->name,
                 kOperation,
                 "slice " + std::to_string(i) + ": " + std::to_string(update.bytes) + " bytes from offset " +
                     std::to_string(update.source_offset) + " to offset " + std::to_string(update.target_offset) +
                     " lie outside the " + std::to_string(bytes) + " prepared bytes"};
  }
  return std::nullopt;
}

ScatterRun* Scatter::take(TransferId id) {
  const std::lock_guard lock(mutex_);
  if (released_) return nullptr;
  auto free = std::find_if(runs_.begin(), runs_.end(), [](const ScatterRun& run) { return run.id() == 0; });
  if (free == runs_.end()) {
    if (runs_.size() >= kMaxRuns) return nullptr;
    runs_.emplace_back(*this);
    free = std::prev(runs_.end());
  }
  users_.fetch_add(1, std::memory_order_relaxed);
  free->id_.store(id, std::memory_order_release);
  return &*free;
}

ScatterRun* Scatter::find(TransferId id) const {
  if (id == 0) return nullptr;  // the id of free runs
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(runs_.begin(), runs_.end(), [id](const ScatterRun& run) { return run.id() == id; });
  return found == runs_.end() ? nullptr : const_cast<ScatterRun*>(&*found);
}

bool Scatter::released() const {
  const std::lock_guard lock(mutex_);
  return released_;
}

bool Scatter::release() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(released_, true)) return false;
  }
  leave();
  return true;
}

void Scatter::leave() {
  if (users_.fetch_sub(1, std::memory_order_acq_rel) == 1) on_end_();
}

// --- The transfer thread

void ScatterRun::start(Poster& poster, Endings& endings) {
  parts_left_ = parts_.size();
  // No post changes these vectors, which the compiler cannot know. With spans a member takes six instructions less.
  const std::span<const Scatter::Slice> slices(scatter_.slices_);
  const std::span<const ScatterUpdate> updates(updates_);
  const std::span<const RequestRef> requests(requests_);
  size_t slice = 0;
  uint32_t member = 0;
  for (Part& part : parts_) {
    Peer& peer = *part.peer;
    part.sealed = true;
    part.cancelled = part.ended = false;
    part.quiesced = true;
    part.error.reset();
    ++peer.scatter_parts;
    const Peer::State state = peer.state.load(std::memory_order_relaxed);
    bool lost = false;  // the target region was forgotten with the peer
    for (; slice < slices.size() && slices[slice].member == member; ++slice) {
      const Scatter::Slice& prepared = slices[slice];
      const ScatterUpdate& update = updates[slice];
      if (update.bytes == 0 && !prepared.immediate) continue;
      const RequestRef& request = requests[slice];
      request->again(prepared.source_offset + update.source_offset, prepared.target_offset + update.target_offset,
                     update.bytes);
      lost |= prepared.target == nullptr && prepared.bytes > 0;
      part.ready.push_back(request);
    }
    ++member;
    if (part.ready.empty()) {
      endings.touch(part);
    } else if (peer.down && !peer.parting.fencing) {
      endings.fail(part, *peer.down);
    } else if (lost || state != Peer::State::kConnected) {
      endings.fail(part, Error{ErrorCode::kUnknownPeer,
                               {},
                               {},
                               "scatter",
                               "the peer is disconnecting, or it was fenced or disconnected"});
    } else {
      poster.start(part);
    }
  }
}

void ScatterRun::cancel(Poster& poster, Endings& endings) {
  for (Part& part : parts_) {
    if (part.ended) continue;
    part.cancelled = true;
    part.ready.clear();
    poster.remove(part);
    endings.touch(part);
  }
}

void ScatterRun::end(Stream& part, Endings& endings) {
  part.ended = true;
  --part.peer->scatter_parts;
  cancelled_ |= part.cancelled;
  quiesced_ &= part.quiesced;
  if (part.error) failures_.push_back({part.peer->id, *part.error});
  if (--parts_left_ > 0) return;

  const auto taken = [](std::atomic<uint64_t>& counter) { return counter.exchange(0, std::memory_order_relaxed); };
  Event event{.kind = EventKind::kTransferDone,
              .id = id(),
              .quiesced = std::exchange(quiesced_, true),
              .pages = taken(progress_.pages_done),
              .bytes = taken(progress_.bytes_done),
              .failures = std::exchange(failures_, {})};
  if (!event.failures.empty()) event.error = event.failures.front().error;
  if (std::exchange(cancelled_, false)) {
    event.kind = EventKind::kTransferCancelled;
  } else if (event.error) {
    event.kind = EventKind::kTransferFailed;
  }
  const std::shared_ptr<Scatter> scatter = std::move(keep_);
  const auto forget = [&] {
    id_.store(0, std::memory_order_release);  // from here on another submission may take the run
    scatter->leave();
    return true;
  };
  if (!scatter->callback_) {
    endings.events().push_if(std::move(event), forget);
  } else {
    forget();
    endings.call(scatter->callback_, event);
  }
}

}  // namespace kvc
