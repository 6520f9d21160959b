// SpscRing: a bounded queue from one thread to another, of slots that stay where they are.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvc {

template <typename T>
class SpscRing {
 public:
  // `slots`: a power of two.
  explicit SpscRing(size_t slots) : slots_(slots) {}
  SpscRing(const SpscRing&) = delete;
  SpscRing& operator=(const SpscRing&) = delete;

  // --- The thread that puts in.

  // The slot to fill next, with whatever was left in it; null: the ring is full.
  T* vacant() noexcept {
    const uint64_t put = put_.load(std::memory_order_relaxed);
    if (put - taken_seen_ == slots_.size()) {
      taken_seen_ = taken_.load(std::memory_order_acquire);
      if (put - taken_seen_ == slots_.size()) return nullptr;
    }
    return &slots_[put & (slots_.size() - 1)];
  }
  // What vacant() gave is filled. Sequentially consistent: followed by Waker::wake(), it is not slept through.
  void put() noexcept { put_.store(put_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst); }
  // How many were put in, ever.
  uint64_t puts() const noexcept { return put_.load(std::memory_order_relaxed); }

  // --- The thread that takes out.

  // How many were put in, ever; all of them can be taken.
  uint64_t ready() const noexcept { return put_.load(std::memory_order_seq_cst); }
  uint64_t taken() const noexcept { return taken_.load(std::memory_order_relaxed); }
  T& front() noexcept { return slots_[taken() & (slots_.size() - 1)]; }
  void pop() noexcept { taken_.store(taken() + 1, std::memory_order_release); }

 private:
  std::vector<T> slots_;
  alignas(64) std::atomic<uint64_t> put_{0};
  uint64_t taken_seen_ = 0;  // of who puts in: it looks again only where the ring seems full
  alignas(64) std::atomic<uint64_t> taken_{0};
};

}  // namespace kvc
