// Waker: how other threads end the worker's sleep, with a system call only if it sleeps.
//
// The protocol that loses no wake-up: a thread makes its work visible (sequentially consistent), then calls wake();
// the worker calls announce_sleep(), then looks for work once more, and only then sleeps on fd(). Either the worker
// sees the work, or the thread sees the announcement.
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

  // Any thread; never blocks. As wake(), of what the worker does not look for before it sleeps: it takes a turn more.
  void nudge() noexcept {
    nudged_.store(true, std::memory_order_seq_cst);
    wake();
  }

  // The worker only. Not to be slept through, once the sleep is announced, where it is true.
  bool take_nudge() noexcept { return nudged_.exchange(false, std::memory_order_seq_cst); }
  // The worker only.
  void announce_sleep() noexcept { sleeping_.store(true, std::memory_order_seq_cst); }
  // Back at work: takes the announcement back and empties the descriptor.
  void awake() noexcept;
  int fd() const noexcept { return fd_.get(); }

 private:
  void signal() noexcept;

  alignas(64) std::atomic<bool> sleeping_{false};  // read by every submission: its own cache line
  std::atomic<bool> nudged_{false};
  const UniqueFd fd_;
};

}  // namespace kvc
