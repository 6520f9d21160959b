// Latch: blocks a thread until the transfer thread has done something for it.
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
  // Returns true if the work is done. False: the timeout passed, and the transfer thread will not try again
  // (abandoned).
  bool wait_for(Timeout timeout) { return wait(timeout, false); }
  // The same for work that must be tried once at least, however short the timeout is.
  bool wait_for_a_try(Timeout timeout) { return wait(timeout, true); }

  // --- The transfer thread.

  // begin() and end() enclose each try of work that may need several tries. begin() returns false if the work is
  // abandoned.
  bool begin() {
    const std::lock_guard lock(mutex_);
    trying_ = !abandoned_;
    return trying_;
  }
  void end(bool done) {
    const std::lock_guard lock(mutex_);
    trying_ = false;
    tried_ = true;
    done_ = done;
    changed_.notify_all();  // under the lock: the waiter may destroy this object as soon as it sees `done_`
  }
  void set_done() { end(true); }

 private:
  bool wait(Timeout timeout, bool try_first) {
    const auto deadline = std::chrono::steady_clock::now() + std::min<Timeout>(timeout, std::chrono::hours(24 * 365));
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [this] { return done_; });
    // The try that runs now may finish the work. Waiting for it makes a result of false final.
    changed_.wait(lock, [&] { return !trying_ && (tried_ || !try_first); });
    abandoned_ = !done_;
    return done_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  bool trying_ = false;
  bool tried_ = false;
  bool abandoned_ = false;
};

}  // namespace kvc
