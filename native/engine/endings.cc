#include "engine/endings.h"

#include <iterator>

namespace kvc {

void Endings::record(Stream& stream, Error error) {
  if (stream.error) return;
  if (error.peer.empty()) error.peer = stream.peer->name;
  if (error.provider.empty()) error.provider = stream.peer->provider;
  stream.error = std::move(error);
}

void Endings::end(Transfer& transfer) {
  Stream& stream = transfer.stream;
  stream.ended = true;
  Event event{.kind = EventKind::kTransferDone,
              .id = transfer.id,
              .quiesced = stream.quiesced,
              .pages = transfer.progress.pages_done.load(std::memory_order_relaxed),
              .bytes = transfer.progress.bytes_done.load(std::memory_order_relaxed),
              .error = stream.error};
  if (stream.cancelled) {
    event.kind = EventKind::kTransferCancelled;
  } else if (stream.error) {
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

void Endings::tell(CounterSets::Fired& set) {
  Event event{.kind = EventKind::kCountersReached, .id = set.id, .error = std::move(set.error)};
  if (set.word) {
    if (Status stored = set.word->store(set.value); !stored) event.error = stored.error();
  }
  // False if the set was released after its last counter reached the target. The event is then not wanted.
  const auto wanted = [&] { return counters_.exists(set.id); };
  if (!set.callback) {
    events_.push_if(std::move(event), wanted);
  } else if (wanted()) {
    call(set.callback, event);
  }
}

void Endings::call(const EventCallback& callback, const Event& event) noexcept {
  try {
    callback(event);
  } catch (...) {
    // No callback can stop the transfer engine. stats() counts its exceptions.
    Stats::add(stats_.callback_errors, 1);
  }
}

void Endings::release(size_t count) {
  const auto end = retired_.begin() + static_cast<ptrdiff_t>(count);
  const std::vector<std::shared_ptr<const void>> released(std::make_move_iterator(retired_.begin()),
                                                          std::make_move_iterator(end));
  retired_.erase(retired_.begin(), end);
}

}  // namespace kvc
