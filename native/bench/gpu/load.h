// Load: keeps GPU 0 busy as a transfer engine would, with one kernel behind the other on its own stream, from its own
// thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>

#include "bench/gpu/bench_kernels.h"
#include "bench/gpu/gpus.h"
#include "bench/gpu/support.h"

namespace kvc::gpu_bench {

class Load {
 public:
  enum class Kind : uint8_t {
    kNone,
    kPersistent,  // a product whose blocks live for 300 us, one per SM with nearly all of its shared memory
    kTiled,       // the same product with five short blocks per SM
    kStream,      // reads memory, as decode does
  };
  static constexpr Kind kKinds[] = {Kind::kNone, Kind::kPersistent, Kind::kTiled, Kind::kStream};
  static const char* name(Kind kind) {
    constexpr const char* kNames[] = {"idle", "persistent", "tiled", "stream"};
    return kNames[static_cast<int>(kind)];
  }

  Load(const Gpus& gpus, Kind kind, const Buffer& memory);
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;
  ~Load();

  // Returns the number of kernels that have ended since the constructor.
  uint64_t ended() const { return word_.word().load(std::memory_order_acquire); }
  // Returns the time of one kernel in us, measured over `nanoseconds` from now on. Calls `meanwhile` all the time.
  template <typename F>
  double kernel_us(int64_t nanoseconds, F&& meanwhile) const {
    const int64_t deadline = now_ns() + 2'000'000'000;
    const auto next = [&](uint64_t after) {
      while (ended() <= after) {
        if (now_ns() > deadline) die("the load's kernels have stopped");
        meanwhile();
      }
      return now_ns();
    };
    const int64_t first = next(ended());
    const uint64_t begun = ended();
    int64_t last = first;
    while (last - first < nanoseconds) last = next(ended());
    return static_cast<double>(last - first) / static_cast<double>(ended() - begun) / 1e3;
  }

 private:
  void run();

  const Gpus& gpus_;
  const Kind kind_;
  const Buffer& memory_;
  const cuda::PinnedMemory word_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace kvc::gpu_bench
