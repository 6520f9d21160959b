// Load: what keeps GPU 0 busy as an engine would, one kernel behind the other on a stream of its own, from a thread.
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
    kPersistent,  // a product whose blocks, one an SM with nearly all of its shared memory, live for 300 us
    kTiled,       // the same with five short blocks an SM
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

  // Kernels that have ended, since the begin.
  uint64_t ended() const { return word_.word().load(std::memory_order_acquire); }
  // The time of one kernel over some time from now on, in us; `meanwhile` is called all the time.
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
