// CallbackQueue: takes events with a Python callback from the transfer thread to the thread that calls it.
//
// The transfer thread only appends here, so it never waits for the interpreter's lock.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "engine/transfer_engine.h"

namespace kvc::python {

class CallbackQueue {
 public:
  struct Entry {
    uint64_t token = 0;
    Event event;
  };

  void put(uint64_t token, const Event& event) {
    const std::lock_guard lock(mutex_);
    entries_.push_back({token, event});
    changed_.notify_one();
  }
  // Blocks until an event arrives. Returns no value once the queue is closed and empty.
  std::optional<Entry> take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return closed_ || !entries_.empty(); });
    if (entries_.empty()) return std::nullopt;
    Entry entry = std::move(entries_.front());
    entries_.pop_front();
    return entry;
  }
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  bool closed_ = false;
};

}  // namespace kvc::python
