// The Copier's kernel with timestamps, and kernels that load the GPU beside measured copies. Hopper only.

#include "bench/gpu/bench_kernels.h"

namespace kvc::gpu_bench {
namespace {

using cuda::kStages;
using cuda::kUnitBytes;
using cuda::PageCopy;

__device__ uint32_t in_shared(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ uint64_t nanoseconds() {
  uint64_t now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

__device__ void begin_barriers(uint64_t* barriers) {
#if __CUDA_ARCH__ >= 900
  for (uint32_t stage = 0; stage < kStages; ++stage) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(in_shared(&barriers[stage])) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Copies the units [begin, end) of the launch with one thread, as kvc_copy_bulk does. `tile` is the launch's list from
// page `first` on.
__device__ void copy_units(const cuda::CopyLaunch& launch, uint32_t begin, uint32_t end, const PageCopy* tile,
                           uint32_t first, unsigned char* stages, uint64_t* barriers) {
#if __CUDA_ARCH__ >= 900
  constexpr uint32_t kAhead = kStages - cuda::kStoresInFlight;
  const uint32_t count = end - begin;
  const auto bytes_of = [&](uint32_t part) {
    const uint64_t left = launch.page_bytes - static_cast<uint64_t>(part) * kUnitBytes;
    return left < kUnitBytes ? static_cast<uint32_t>(left) : kUnitBytes;
  };
  const auto load = [&](uint32_t index) {
    const uint32_t unit = begin + index;
    const uint32_t part = unit % launch.units_per_page;
    const uint32_t stage = index % kStages;
    const uint64_t source =
        tile[unit / launch.units_per_page - first].source + static_cast<uint64_t>(part) * kUnitBytes;
    const uint32_t bytes = bytes_of(part);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(&barriers[stage])), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     in_shared(stages + stage * kUnitBytes)),
                 "l"(source), "r"(bytes), "r"(in_shared(&barriers[stage]))
                 : "memory");
  };
  for (uint32_t index = 0; index < min(count, kAhead); ++index) load(index);
  for (uint32_t index = 0; index < count; ++index) {
    const uint32_t unit = begin + index;
    const uint32_t part = unit % launch.units_per_page;
    const uint32_t stage = index % kStages;
    const uint32_t parity = index / kStages % 2;
    uint32_t ready = 0;
    while (ready == 0) {
      asm volatile(
          "{\n"
          ".reg .pred complete;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
          "selp.u32 %0, 1, 0, complete;\n"
          "}\n"
          : "=r"(ready)
          : "r"(in_shared(&barriers[stage])), "r"(parity)
          : "memory");
    }
    const uint64_t target =
        tile[unit / launch.units_per_page - first].target + static_cast<uint64_t>(part) * kUnitBytes;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
                 "r"(in_shared(stages + stage * kUnitBytes)), "r"(bytes_of(part))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(cuda::kStoresInFlight) : "memory");
    if (index + kAhead < count) load(index + kAhead);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

}  // namespace

// kvc_copy_bulk with timestamps, for launches of at most kTilePages pages a block.
extern "C" __global__ void __launch_bounds__(32)
    bench_copy_timed(const __grid_constant__ cuda::CopyLaunch launch, BlockTimes* times) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto* tile = reinterpret_cast<PageCopy*>(shared + kStages * kUnitBytes);
  auto* barriers = reinterpret_cast<uint64_t*>(tile + cuda::kTilePages);
  BlockTimes mine;
  const auto note = [&](Moment moment) {
    mine.nanoseconds[moment] = nanoseconds();
    mine.cycles[moment] = clock64();
  };
  note(kBegun);
  if (threadIdx.x == 0) begin_barriers(barriers);
  const uint64_t units = launch.units;
  const auto begin = static_cast<uint32_t>(units * blockIdx.x / gridDim.x);
  const auto end = static_cast<uint32_t>(units * (blockIdx.x + 1) / gridDim.x);
  const uint32_t first = begin / launch.units_per_page;
  const uint32_t pages = end > begin ? (end - 1) / launch.units_per_page + 1 - first : 0;
  for (uint32_t i = threadIdx.x; i < min(pages, cuda::kTilePages); i += 32) tile[i] = launch.pages[first + i];
  __syncwarp();
  if (threadIdx.x != 0) return;
  note(kListRead);
  copy_units(launch, begin, end, tile, first, shared, barriers);
  note(kCopied);
  __threadfence_system();
  if (atomicAdd(launch.blocks_done, 1U) + 1 == gridDim.x) {
    *launch.blocks_done = 0;
    __threadfence_system();
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(launch.finished), "l"(launch.sequence) : "memory");
  }
  note(kFinished);
  times[blockIdx.x] = mine;
}

// Writes to `out` (pinned memory): the mean step of the GPU's clock over 64 steps, at least 200 us by that clock, and
// the SM's cycles in that time.
extern "C" __global__ void bench_clock_steps(uint64_t* out) {
  const uint64_t begin = nanoseconds();
  const uint64_t first_cycle = clock64();
  uint64_t now = begin;
  for (uint32_t steps = 0; steps < 64;) {
    const uint64_t next = nanoseconds();
    if (next != now) ++steps;
    now = next;
  }
  // The loop is long enough to count the cycles in a microsecond.
  while (nanoseconds() - begin < 200000) {
  }
  out[0] = (now - begin) / 64;
  out[1] = nanoseconds() - begin;
  out[2] = clock64() - first_cycle;
}

// A block's part of a matrix product, with the SM time and shared memory of a real one.
extern "C" __global__ void __launch_bounds__(kProductThreads, 1) bench_product(float* out, uint32_t rounds) {
  extern __shared__ float shared_sums[];
  float sums[128];
  const float factor = 1.0F + static_cast<float>(threadIdx.x) * 1e-9F;
#pragma unroll
  for (int i = 0; i < 128; ++i) sums[i] = static_cast<float>(i);
  for (uint32_t round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 128; ++i) sums[i] = sums[i] * factor + 1e-6F;
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 128; ++i) sum += sums[i];
  shared_sums[threadIdx.x] = sum;
  if (sum == -1.0F) out[blockIdx.x] = shared_sums[threadIdx.x];
}

// Reads memory once at full speed, as decode does.
extern "C" __global__ void __launch_bounds__(kStreamThreads)
    bench_stream(const uint4* from, uint64_t vectors, uint32_t* out) {
  uint32_t sum = 0;
  const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += 4 * stride) {
    uint4 seen[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j * stride < vectors) seen[j] = __ldcs(&from[i + j * stride]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += seen[j].x ^ seen[j].y ^ seen[j].z ^ seen[j].w;
  }
  if (sum == 0x12345678U) out[blockIdx.x] = sum;
}

}  // namespace kvc::gpu_bench
