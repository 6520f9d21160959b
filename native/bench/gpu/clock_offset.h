// ClockOffset: the difference between the GPU's clock and the host's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "bench/gpu/support.h"
#include "cuda/driver.h"

namespace kvc::gpu_bench {

// The GPU's clock minus the host's, and the largest error of that, both in ns.
struct ClockOffset {
  int64_t offset = 0;
  int64_t uncertainty = 0;
};
inline ClockOffset calibrate(const cuda::Driver& driver, cuda::Function stamp, cuda::Stream stream) {
  auto words = must(cuda::PinnedMemory::allocate(driver, 128));
  auto* gate = static_cast<std::atomic<uint64_t>*>(words.data());
  auto* out = gate + 8;
  int64_t low = INT64_MIN;
  int64_t high = INT64_MAX;
  gate->store(0);
  for (uint64_t round = 1; round <= 2000; ++round) {
    out->store(0);
    cuda::DevicePointer out_address = words.device() + 64;
    cuda::DevicePointer gate_address = words.device();
    void* arguments[] = {&out_address, &gate_address, &round};
    must_cuda(driver.cuLaunchKernel(stamp, 1, 1, 1, 1, 1, 1, 0, stream, static_cast<void**>(arguments), nullptr),
              "cuLaunchKernel");
    const int64_t ready = now_ns();
    while (now_ns() - ready < 15000) {
    }
    const int64_t before = now_ns();
    gate->store(round);
    while (out->load() == 0) {
    }
    const int64_t after = now_ns();
    const auto gpu = static_cast<int64_t>(out->load());
    low = std::max(low, gpu - after);
    high = std::min(high, gpu - before);
  }
  return {(low + high) / 2, (high - low) / 2};
}

}  // namespace kvc::gpu_bench
