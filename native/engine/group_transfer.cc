#include "engine/group_transfer.h"

#include <utility>

namespace kvc {

void GroupTransfer::ended(PeerId peer, const Event& event, Registry<GroupTransfer>& groups, EventQueue& events,
                          Stats& stats) {
  event_.pages += event.pages;
  event_.bytes += event.bytes;
  event_.quiesced &= event.quiesced;
  cancelled_ |= event.kind == EventKind::kTransferCancelled;
  if (event.error) {
    if (!event_.error) event_.error = event.error;
    event_.failures.push_back({peer, *event.error});
  }
  if (--parts_left_ > 0) return;

  event_.id = id_;
  event_.kind = EventKind::kTransferDone;
  if (cancelled_) {
    event_.kind = EventKind::kTransferCancelled;
  } else if (event_.error) {
    event_.kind = EventKind::kTransferFailed;
  }
  const auto forget = [&] { return groups.erase(id_) != nullptr; };
  if (!callback_) {
    events.push_if(std::move(event_), forget);
  } else if (forget()) {
    try {
      callback_(event_);
    } catch (...) {
      Stats::add(stats.callback_errors, 1);
    }
  }
}

}  // namespace kvc
