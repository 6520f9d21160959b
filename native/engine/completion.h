// Completion: what a thread blocks on while the worker does something for it.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "engine/transfer_engine.h"

namespace kvc {

class Completion {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }
  // True if done. False: the time is over, and the worker will not do it any more (abandoned).
  bool wait_for(Timeout timeout) {
    const auto deadline = std::chrono::steady_clock::now() + std::min<Timeout>(timeout, std::chrono::hours(24 * 365));
    std::unique_lock lock(mutex_);
    abandoned_ = !changed_.wait_until(lock, deadline, [this] { return done_; });
    return done_;
  }
  void set_done() {
    const std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();  // under the lock: the waiter may destroy this as soon as it can see `done_`
  }
  bool abandoned() {
    const std::lock_guard lock(mutex_);
    return abandoned_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  bool abandoned_ = false;
};

}  // namespace kvc
