// EventQueue: events on their way from the worker to whoever waits, polls, or watches the descriptor.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/ready_fd.h"
#include "engine/transfer_engine.h"

namespace kvc {

// Any thread may call anything; only wait() blocks.
class EventQueue {
 public:
  Status open() { return ready_.open(); }

  // Hands an event over: to the thread that waits for it, or to the queue.
  void push(Event event);
  // The same if `still_wanted`, asked under the queue's lock, says so. A transfer's final event forgets its id there, so
  // that who has seen the event finds the id forgotten; false where somebody else has done so before.
  void push_if(Event event, const std::function<bool()>& still_wanted);

  // Blocks until the event of (`kinds`, `id`) is there, and takes it; kTimeout after `timeout`. `pending` says under
  // the queue's lock whether the event may still come: kInvalidArgument once it is false. `stays`: TransferEngine's.
  enum class Subject : uint8_t { kTransfer, kCounters, kPeer };
  Result<Event> wait(Subject subject, uint64_t id, Timeout timeout, const std::function<bool()>& pending,
                     const std::function<bool()>& stays = {});
  // Drops an event that nobody has taken, and makes waiters ask their `pending` again.
  void discard(Subject subject, uint64_t id);

  std::vector<Event> poll(size_t max);
  // Readable while poll() would return something.
  int fd();

 private:
  static uint64_t key(Subject subject, uint64_t id) { return (id << 2) | static_cast<uint64_t>(subject); }
  static uint64_t key(const Event& event);
  struct Queued {
    Event event;
    std::optional<std::list<Queued>::iterator> next{};  // the next one of the same key
  };
  using Place = std::list<Queued>::iterator;

  void deliver(Event event);
  std::optional<Event> take(uint64_t key);
  // The oldest one of its key leaves the queue.
  Event remove(std::unordered_map<uint64_t, std::pair<Place, Place>>::iterator entry);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Queued> queue_;                                      // oldest first
  std::unordered_map<uint64_t, std::pair<Place, Place>> index_;  // the oldest and the newest of each key
  std::unordered_map<uint64_t, std::deque<Event>> reserved_;     // events that a thread is waiting for, oldest first
  std::unordered_map<uint64_t, uint32_t> waiting_;               // threads in wait() by key
  ReadyFd ready_;
};

}  // namespace kvc
