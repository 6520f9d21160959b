// Waker: ends the sleep of the transfer thread, with a system call only if it sleeps.
//
// This protocol loses no wake-up. A thread publishes its work (sequentially consistent), then calls wake(). The
// transfer thread calls announce_sleep(), looks for work once more, and only then sleeps on fd(). Either the transfer
// thread sees the work, or the other thread sees the announcement.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/unique_fd.h"

namespace kvc {

class Waker {
 public:
  static Result<std::shared_ptr<Waker>> create();
  explicit Waker(UniqueFd fd) : fd_(std::move(fd)) {}
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

  // Any thread; never blocks.
  void wake() noexcept {
    if (sleeping_.load(std::memory_order_seq_cst) && sleeping_.exchange(false, std::memory_order_seq_cst)) signal();
  }

  // Any thread; never blocks. Like wake(), for work that the transfer thread does not look for before it sleeps: it
  // runs one more turn.
  void nudge() noexcept {
    nudged_.store(true, std::memory_order_seq_cst);
    wake();
  }

  // The transfer thread only. If this returns true after announce_sleep(), the thread must not sleep.
  bool take_nudge() noexcept { return nudged_.exchange(false, std::memory_order_seq_cst); }
  // The transfer thread only.
  void announce_sleep() noexcept { sleeping_.store(true, std::memory_order_seq_cst); }
  // The transfer thread only, after a sleep. Takes back the announcement and empties the descriptor.
  void awake() noexcept;
  int fd() const noexcept { return fd_.get(); }

 private:
  void signal() noexcept;

  // Every submission reads this word, so it has its own cache line.
  alignas(64) std::atomic<bool> sleeping_{false};
  std::atomic<bool> nudged_{false};
  const UniqueFd fd_;
};

}  // namespace kvc
