// SpscRing: a bounded queue from one thread to another. Its slots never move.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvc {

template <typename T>
class SpscRing {
 public:
  // `slots` must be a power of two.
  explicit SpscRing(size_t slots) : slots_(slots) {}
  SpscRing(const SpscRing&) = delete;
  SpscRing& operator=(const SpscRing&) = delete;

  // --- The producer thread.

  // The next slot to fill, with the contents of its last use. Null if the ring is full.
  T* vacant() noexcept {
    const uint64_t put = put_.load(std::memory_order_relaxed);
    if (put - taken_seen_ == slots_.size()) {
      taken_seen_ = taken_.load(std::memory_order_acquire);
      if (put - taken_seen_ == slots_.size()) return nullptr;
    }
    return &slots_[put & (slots_.size() - 1)];
  }
  // Publishes the slot from vacant(). Sequentially consistent, so that a following Waker::wake() reaches a sleeping
  // consumer.
  void put() noexcept { put_.store(put_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst); }
  // Number of items ever put in.
  uint64_t puts() const noexcept { return put_.load(std::memory_order_relaxed); }

  // --- The consumer thread.

  // Number of items ever put in. All of them can be taken.
  uint64_t ready() const noexcept { return put_.load(std::memory_order_seq_cst); }
  uint64_t taken() const noexcept { return taken_.load(std::memory_order_relaxed); }
  T& front() noexcept { return slots_[taken() & (slots_.size() - 1)]; }
  void pop() noexcept { taken_.store(taken() + 1, std::memory_order_release); }

 private:
  std::vector<T> slots_;
  alignas(64) std::atomic<uint64_t> put_{0};
  // The producer's copy of taken_. It is refreshed only when the ring seems full.
  uint64_t taken_seen_ = 0;
  alignas(64) std::atomic<uint64_t> taken_{0};
};

}  // namespace kvc
