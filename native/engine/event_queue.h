// EventQueue: carries events from the transfer thread to threads that wait, poll or watch the descriptor.
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

// Any thread may call any method. Only wait() blocks.
class EventQueue {
 public:
  Status open() { return ready_.open(); }

  // Delivers an event to the thread that waits for it, or to the queue.
  void push(Event event);
  // Delivers the event if `still_wanted`, called under the queue's lock, returns true. The final event of a transfer
  // forgets the transfer's id in this call, so that a thread that has seen the event finds the id forgotten.
  // `still_wanted` returns false if another thread has forgotten the id before.
  void push_if(Event event, const std::function<bool()>& still_wanted);

  // Blocks until the event of (`subject`, `id`) arrives, and takes it. Returns kTimeout after `timeout`. `pending`,
  // called under the queue's lock, tells whether the event may still arrive; false ends the wait with kInvalidArgument.
  // `stays` is described in TransferEngine.
  enum class Subject : uint8_t { kTransfer, kCounters, kPeer };
  Result<Event> wait(Subject subject, uint64_t id, Timeout timeout, const std::function<bool()>& pending,
                     const std::function<bool()>& stays = {});
  // Drops an untaken event and makes waiting threads call `pending` again.
  void discard(Subject subject, uint64_t id);

  std::vector<Event> poll(size_t max);
  // Readable while poll() would return an event.
  int fd();

 private:
  static uint64_t key(Subject subject, uint64_t id) { return (id << 2) | static_cast<uint64_t>(subject); }
  static uint64_t key(const Event& event);
  struct Queued {
    Event event;
    std::optional<std::list<Queued>::iterator> next{};  // the next event of the same key
  };
  using Place = std::list<Queued>::iterator;

  void deliver(Event event);
  std::optional<Event> take(uint64_t key);
  // Removes the oldest event of a key from the queue.
  Event remove(std::unordered_map<uint64_t, std::pair<Place, Place>>::iterator entry);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Queued> queue_;                                      // oldest first
  std::unordered_map<uint64_t, std::pair<Place, Place>> index_;  // the oldest and the newest event of each key
  std::unordered_map<uint64_t, std::deque<Event>> reserved_;     // events for threads in wait(), oldest first
  std::unordered_map<uint64_t, uint32_t> waiting_;               // threads in wait() by key
  ReadyFd ready_;
};

}  // namespace kvc
