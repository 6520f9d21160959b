// Latch: what a thread blocks on while the worker does something for it.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/timeout.h"

namespace kvc {

class Latch {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }
  // True if done. False: the time is over, and the worker will not do it any more (it is abandoned).
  bool wait_for(Timeout timeout) {
    const auto deadline = std::chrono::steady_clock::now() + std::min<Timeout>(timeout, std::chrono::hours(24 * 365));
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [this] { return done_; });
    // What it is doing right now may be the last step: whoever is told that it is not done can rely on that.
    changed_.wait(lock, [this] { return !trying_; });
    abandoned_ = !done_;
    return done_;
  }

  // --- The worker.

  // Around each try of something that may have to be tried again. False: it is abandoned.
  bool begin() {
    const std::lock_guard lock(mutex_);
    trying_ = !abandoned_;
    return trying_;
  }
  void end(bool done) {
    const std::lock_guard lock(mutex_);
    trying_ = false;
    done_ = done;
    changed_.notify_all();  // under the lock: the waiter may destroy this as soon as it can see `done_`
  }
  void set_done() { end(true); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  bool trying_ = false;
  bool abandoned_ = false;
};

}  // namespace kvc
