// Trace: what the worker did with each armed request and each counter, and when: a transfer's timeline is made of it.
//
// Off until TransferEngine::start_trace(): until then Stats::trace, by which the worker finds it, is null.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/transfer_engine.h"

namespace kvc {

class Trace {
 public:
  // From now on it keeps up to `capacity` steps until they are taken; what comes beyond them is lost, and counted.
  void start(size_t capacity) {
    const std::lock_guard lock(mutex_);
    capacity_ = capacity;
    steps_.reserve(capacity);
  }

  // The step is made now. The worker's.
  void note(TraceStep step) {
    step.nanoseconds = std::chrono::steady_clock::now().time_since_epoch().count();
    const std::lock_guard lock(mutex_);
    if (steps_.size() < capacity_) {
      steps_.push_back(step);
    } else {
      ++lost_;
    }
  }

  // Any thread: the steps since the last call.
  TakenTrace take() {
    // Not under the lock, which the worker takes for each note: a copy of 100,000 steps takes it milliseconds.
    std::vector<TraceStep> next;
    next.reserve(capacity());
    const std::lock_guard lock(mutex_);
    steps_.swap(next);
    return {std::move(next), std::exchange(lost_, 0)};
  }

 private:
  size_t capacity() {
    const std::lock_guard lock(mutex_);
    return capacity_;
  }

  std::mutex mutex_;  // of all
  size_t capacity_ = 0;
  std::vector<TraceStep> steps_;
  uint64_t lost_ = 0;
};

}  // namespace kvc
