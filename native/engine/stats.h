// Stats: the counters of the transfer thread. Any thread may read them while they grow.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvc {

class Trace;

struct Stats {
  std::atomic<uint64_t> pages_written{0};
  std::atomic<uint64_t> bytes_written{0};
  std::atomic<uint64_t> batches_posted{0};
  std::atomic<uint64_t> immediates_received{0};
  std::atomic<uint64_t> immediates_stale{0};
  std::atomic<uint64_t> immediates_foreign{0};
  std::atomic<uint64_t> links{0};  // up now
  std::atomic<uint64_t> links_lost{0};
  std::atomic<uint64_t> links_restored{0};
  std::atomic<uint64_t> pages_rewritten{0};
  std::atomic<uint64_t> sleeps{0};
  std::atomic<uint64_t> callback_errors{0};

  Trace* trace = nullptr;  // used on the transfer thread; null: tracing is off

  // Adds to a counter with one writing thread, without a locked instruction. To lower a gauge, add a negative number.
  static void add(std::atomic<uint64_t>& counter, uint64_t n) noexcept {
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
};

}  // namespace kvc
