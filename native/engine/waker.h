// Waker: how other threads end the worker's sleep, with a system call only if it sleeps.
//
// The protocol that loses no wake-up: a thread makes its work visible (sequentially consistent), then calls wake();
// the worker calls announce_sleep(), then looks for work once more, and only then sleeps on fd(). Either the worker
// sees the work, or the thread sees the announcement.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "engine/error.h"
#include "engine/unique_fd.h"

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

  // The worker only.
  void announce_sleep() noexcept { sleeping_.store(true, std::memory_order_seq_cst); }
  // Back at work: takes the announcement back and empties the descriptor.
  void awake() noexcept;
  int fd() const noexcept { return fd_.get(); }

 private:
  void signal() noexcept;

  alignas(64) std::atomic<bool> sleeping_{false};  // read by every submission: its own cache line
  const UniqueFd fd_;
};

}  // namespace kvc
