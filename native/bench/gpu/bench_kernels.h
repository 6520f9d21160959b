// Declarations that the host and bench_kernels.cu share: the Copier's kernel with timestamps, and kernels that keep a
// GPU busy, for `kvc_gpu_bench stages` and `latency`. Included by nvcc and by the C++ compiler.
#pragma once

#include <cstdint>

#include "cuda/kernels.h"

namespace kvc::gpu_bench {

// The timestamps of each block of bench_copy_timed: the GPU's clock in ns, and its SM's in cycles.
enum Moment : uint32_t { kBegun, kListRead, kCopied, kFinished, kMoments };
struct BlockTimes {
  uint64_t nanoseconds[kMoments];
  uint64_t cycles[kMoments];
};

// A product's tile: 384 threads with 128 sums each and most of an SM's shared memory, like CUTLASS' kernels for Hopper.
inline constexpr uint32_t kProductThreads = 384;
inline constexpr uint32_t kProductShared = 200 << 10;
inline constexpr uint32_t kStreamThreads = 512;

}  // namespace kvc::gpu_bench
