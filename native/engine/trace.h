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
    const std::lock_guard lock(mutex_);
    TakenTrace taken{steps_, std::exchange(lost_, 0)};
    steps_.clear();  // its memory is used again
    return taken;
  }

 private:
  std::mutex mutex_;  // of all
  size_t capacity_ = 0;
  std::vector<TraceStep> steps_;
  uint64_t lost_ = 0;
};

}  // namespace kvc
