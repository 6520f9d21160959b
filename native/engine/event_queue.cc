#include "engine/event_queue.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kvc {

namespace {

// Interval of the checks of `stays` while a thread waits (Ctrl-C in Python, close() on another thread). A person does
// not notice the delay, and the check costs nothing.
constexpr auto kLook = std::chrono::milliseconds(100);

}  // namespace

uint64_t EventQueue::key(const Event& event) {
  switch (event.kind) {
    case EventKind::kCountersReached:
      return key(Subject::kCounters, event.id);
    case EventKind::kPeerDown:
    case EventKind::kPeerLeft:
      return key(Subject::kPeer, event.id);
    default:
      return key(Subject::kTransfer, event.id);
  }
}

void EventQueue::push(Event event) {
  const std::lock_guard lock(mutex_);
  deliver(std::move(event));
}

void EventQueue::push_if(Event event, const std::function<bool()>& still_wanted) {
  const std::lock_guard lock(mutex_);
  if (still_wanted()) deliver(std::move(event));
}

void EventQueue::deliver(Event event) {
  const uint64_t event_key = key(event);
  if (waiting_.contains(event_key)) {
    reserved_[event_key].push_back(std::move(event));
    changed_.notify_all();
    return;
  }
  const Place place = queue_.insert(queue_.end(), {std::move(event)});
  const auto [entry, first] = index_.try_emplace(event_key, place, place);
  if (!first) entry->second.second = *(entry->second.second->next = place);
  ready_.update(true);
}

Event EventQueue::remove(std::unordered_map<uint64_t, std::pair<Place, Place>>::iterator entry) {
  const Place place = entry->second.first;
  if (place->next) {
    entry->second.first = *place->next;
  } else {
    index_.erase(entry);
  }
  Event event = std::move(place->event);
  queue_.erase(place);
  return event;
}

std::optional<Event> EventQueue::take(uint64_t event_key) {
  if (const auto reserved = reserved_.find(event_key); reserved != reserved_.end()) {
    std::optional<Event> event(std::move(reserved->second.front()));
    reserved->second.pop_front();
    if (reserved->second.empty()) reserved_.erase(reserved);
    return event;
  }
  const auto found = index_.find(event_key);
  if (found == index_.end()) return std::nullopt;
  std::optional<Event> event(remove(found));
  ready_.update(!queue_.empty());
  return event;
}

Result<Event> EventQueue::wait(Subject subject, uint64_t id, Timeout timeout, const std::function<bool()>& pending,
                               const std::function<bool()>& stays) {
  // A deadline beyond the range of the clock would overflow into the past.
  const auto deadline = std::chrono::steady_clock::now() + std::min<Timeout>(timeout, std::chrono::hours(24 * 365));
  const uint64_t event_key = key(subject, id);
  const char* operation = subject == Subject::kTransfer ? "wait_transfer" : "wait_counters";
  std::unique_lock lock(mutex_);
  ++waiting_[event_key];
  std::optional<Event> event;
  ErrorCode why = ErrorCode::kInvalidArgument;
  auto look = stays ? std::chrono::steady_clock::now() + kLook : deadline;
  while (!(event = take(event_key)) && pending()) {
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) {
      why = ErrorCode::kTimeout;
      break;
    }
    if (now >= look) {
      lock.unlock();
      const bool leaves = !stays();
      lock.lock();
      if (leaves) {
        why = ErrorCode::kCancelled;
        break;
      }
      look = std::chrono::steady_clock::now() + kLook;
      continue;
    }
    changed_.wait_until(lock, std::min(look, deadline));
  }
  if (--waiting_[event_key] == 0) {
    waiting_.erase(event_key);
    if (auto left = reserved_.extract(event_key)) {
      for (Event& other : left.mapped()) deliver(std::move(other));  // later polls return them
    }
  }
  if (event) return std::move(*event);
  if (why == ErrorCode::kTimeout) return Error{why, {}, {}, operation, "no event for " + std::to_string(id) + " yet"};
  if (why == ErrorCode::kCancelled) return Error{why, {}, {}, operation, "the wait was cancelled"};
  return Error{why, {}, {}, operation, std::to_string(id) + " is not open and has no event left"};
}

void EventQueue::discard(Subject subject, uint64_t id) {
  const std::lock_guard lock(mutex_);
  while (take(key(subject, id))) {
  }
  changed_.notify_all();
}

std::vector<Event> EventQueue::poll(size_t max) {
  const std::lock_guard lock(mutex_);
  std::vector<Event> events;
  while (events.size() < max && !queue_.empty()) {
    events.push_back(remove(index_.find(key(queue_.front().event))));
  }
  ready_.update(!queue_.empty());
  return events;
}

int EventQueue::fd() {
  const std::lock_guard lock(mutex_);
  return ready_.fd(!queue_.empty());
}

}  // namespace kvc
