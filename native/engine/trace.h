// Trace: records what the transfer thread did with each armed request and each counter, and when. A transfer's timeline
// is built from it.
//
// Off until TransferEngine::start_trace(). Until then Stats::trace, which the transfer thread checks, is null.
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
  // Keeps up to `capacity` steps between two calls of take(). Later steps are lost and counted.
  void start(size_t capacity) {
    const std::lock_guard lock(mutex_);
    capacity_ = capacity;
    steps_.reserve(capacity);
  }

  // Records a step with the current time. Used on the transfer thread.
  void note(TraceStep step) {
    step.nanoseconds = std::chrono::steady_clock::now().time_since_epoch().count();
    const std::lock_guard lock(mutex_);
    if (steps_.size() < capacity_) {
      steps_.push_back(step);
    } else {
      ++lost_;
    }
  }

  // Returns the steps since the last call. Any thread.
  TakenTrace take() {
    // Outside the lock, which the transfer thread takes for each note: allocating 100,000 steps takes milliseconds.
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

  std::mutex mutex_;  // guards all fields
  size_t capacity_ = 0;
  std::vector<TraceStep> steps_;
  uint64_t lost_ = 0;
};

}  // namespace kvc
