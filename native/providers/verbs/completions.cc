#include "providers/verbs/completions.h"

#include <algorithm>
#include <utility>

namespace kvc::verbs {

namespace {

// Number of events that are acknowledged together, because an acknowledgement takes a lock.
constexpr unsigned kEventsAcknowledged = 1024;

}  // namespace

Completions::~Completions() {
  // The queue's destruction waits for the acknowledgement.
  if (unacknowledged_ > 0) resources_.device->library().ack_cq_events(resources_.completions.get(), unacknowledged_);
}

std::span<const abi::ibv_wc> Completions::take() noexcept {
  const int polled = resources_.device->context()->ops.poll_cq(resources_.completions.get(), kBatch, batch_.data());
  // an error of the queue itself is reported as an event
  const auto count = static_cast<uint32_t>(std::max(polled, 0));
  taken_ += count;
  if (count < kBatch) ++found_empty_;
  return {batch_.data(), count};
}

Completions::Mark Completions::mark() const noexcept {
  Mark mark;
  mark.taken = taken_;
  mark.found_empty = found_empty_;
  return mark;
}

bool Completions::passed(const Mark& mark) const noexcept {
  return found_empty_ > mark.found_empty || taken_ - mark.taken >= resources_.entries;
}

bool Completions::arm() noexcept {
  const bool completion = !armed_ || read_event();
  if (completion) armed_ = resources_.device->context()->ops.req_notify_cq(resources_.completions.get(), 0) == 0;
  return completion;
}

bool Completions::read_event() noexcept {
  const Library& library = resources_.device->library();
  abi::ibv_cq* cq = nullptr;
  void* context = nullptr;
  if (library.get_cq_event(resources_.channel.get(), &cq, &context) != 0) return false;
  if (++unacknowledged_ >= kEventsAcknowledged) {
    library.ack_cq_events(resources_.completions.get(), std::exchange(unacknowledged_, 0));
  }
  return true;
}

}  // namespace kvc::verbs
