// Other ways to copy pages than cuda/kernels.cu's, to be measured beside it, and loads to measure them under. Hopper only.

#include "gpu_bench/candidates.h"

namespace kvc::gpu_bench {
namespace {

__device__ uint32_t in_shared(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ void store_relaxed(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ uint64_t nanoseconds() {
  uint64_t now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

template <uint32_t kUnit, uint32_t kStages>
__device__ void begin_barriers(uint64_t* barriers) {
#if __CUDA_ARCH__ >= 900
  for (uint32_t stage = 0; stage < kStages; ++stage) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(in_shared(&barriers[stage])) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// One thread copies units [begin, end) of the pages that `page(i)` names, through `stages`. `turn`: units that have gone
// through the barriers before; raised.
template <uint32_t kUnit, uint32_t kStages, typename Page>
__device__ void copy_units(Page page, uint64_t page_bytes, uint32_t begin, uint32_t end, unsigned char* stages,
                           uint64_t* barriers, uint32_t& turn) {
#if __CUDA_ARCH__ >= 900
  constexpr uint32_t kStoring = kStages / 3 > 0 ? kStages / 3 : 1;
  constexpr uint32_t kAhead = kStages - kStoring;
  const auto units_per_page = static_cast<uint32_t>((page_bytes + kUnit - 1) / kUnit);
  const uint32_t count = end - begin;
  const auto bytes_of = [&](uint32_t part) {
    const uint64_t left = page_bytes - static_cast<uint64_t>(part) * kUnit;
    return left < kUnit ? static_cast<uint32_t>(left) : kUnit;
  };
  const auto load = [&](uint32_t index) {
    const uint32_t unit = begin + index;
    const uint32_t part = unit % units_per_page;
    const uint32_t stage = (turn + index) % kStages;
    const uint64_t source = page(unit / units_per_page).source + static_cast<uint64_t>(part) * kUnit;
    const uint32_t bytes = bytes_of(part);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(&barriers[stage])), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     in_shared(stages + stage * kUnit)),
                 "l"(source), "r"(bytes), "r"(in_shared(&barriers[stage]))
                 : "memory");
  };
  for (uint32_t index = 0; index < min(count, kAhead); ++index) load(index);
  for (uint32_t index = 0; index < count; ++index) {
    const uint32_t unit = begin + index;
    const uint32_t part = unit % units_per_page;
    const uint32_t stage = (turn + index) % kStages;
    const uint32_t parity = (turn + index) / kStages % 2;
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
    const uint64_t target = page(unit / units_per_page).target + static_cast<uint64_t>(part) * kUnit;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
                 "r"(in_shared(stages + stage * kUnit)), "r"(bytes_of(part))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStoring) : "memory");
    if (index + kAhead < count) load(index + kAhead);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  turn += count;
#endif
}

struct Range {
  uint32_t begin;
  uint32_t end;
};
template <uint32_t kUnit>
__device__ Range range_of_block(uint64_t page_bytes, uint32_t pages) {
  const uint64_t units = (page_bytes + kUnit - 1) / kUnit * pages;
  return {static_cast<uint32_t>(units * blockIdx.x / gridDim.x),
          static_cast<uint32_t>(units * (blockIdx.x + 1) / gridDim.x)};
}

template <uint32_t kUnit, uint32_t kStages>
__device__ void copy_inline(const InlineLaunch& launch) {
  extern __shared__ __align__(128) unsigned char stages[];
  __shared__ uint64_t barriers[kStages];
  if (threadIdx.x != 0) return;
  begin_barriers<kUnit, kStages>(barriers);
  const Range range = range_of_block<kUnit>(launch.page_bytes, launch.count);
  uint32_t turn = 0;
  copy_units<kUnit, kStages>([&](uint32_t i) { return launch.pages[i]; }, launch.page_bytes, range.begin, range.end,
                             stages, barriers, turn);
  __threadfence_system();
  store_relaxed(&launch.finished[blockIdx.x], launch.sequence);
}

__device__ PageCopy look(const PageCopy* at) {
  PageCopy seen;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(seen.source), "=l"(seen.target) : "l"(at) : "memory");
  return seen;
}

// Runs until the ring says stop, or for `life_ns` at the longest. One warp a block; its first lanes look at the next slot.
template <uint32_t kUnit, uint32_t kStages>
__device__ void stay(const Ring* ring, uint64_t* finished, uint64_t page_bytes, uint64_t life_ns) {
  extern __shared__ __align__(128) unsigned char stages[];
  __shared__ uint64_t barriers[kStages];
  __shared__ PageCopy tile[kSlotPages];
  constexpr uint32_t kLooking = 8;  // lanes: 128 bytes
  constexpr uint64_t kAddress = (uint64_t{1} << 48) - 1;
  const uint32_t lane = threadIdx.x;
  if (lane == 0) begin_barriers<kUnit, kStages>(barriers);
  __syncwarp();
  const uint64_t begun = nanoseconds();
  uint32_t turn = 0;
  for (uint64_t number = 0;; ++number) {
    const PageCopy* slot = ring->slots[number % kSlots];
    const uint64_t expected = number / kSlots % 255;
    PageCopy mine{};
    uint32_t count = 0;
    for (;;) {
      if (lane < kLooking) mine = look(&slot[lane]);
      const uint64_t first = __shfl_sync(~0U, static_cast<unsigned long long>(mine.source), 0) >> 48;
      if (first == kStopMark) return;
      // A slot that was never used is all zero, and so would be turn 0: no slot is of no pages.
      count = static_cast<uint32_t>(first & 0xff);
      const bool valid = lane >= min(count, kLooking) || ((mine.source >> 48) == first && (mine.target >> 48) == first);
      if (count != 0 && first >> 8 == expected && __all_sync(~0U, valid)) break;
      if (nanoseconds() - begun > life_ns) return;
    }
    if (count > kLooking) mine = look(&slot[lane]);
    if (lane < count) tile[lane] = {mine.source & kAddress, mine.target & kAddress};
    __syncwarp();
    if (lane == 0) {
      const Range range = range_of_block<kUnit>(page_bytes, count);
      if (range.end > range.begin) {
        copy_units<kUnit, kStages>([&](uint32_t i) { return tile[i]; }, page_bytes, range.begin, range.end, stages,
                                   barriers, turn);
        __threadfence_system();
      }
      store_relaxed(&finished[blockIdx.x], number + 1);
    }
    __syncwarp();
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32) bench_inline_large(const __grid_constant__ InlineLaunch launch) {
  copy_inline<kLargeUnit, kLargeStages>(launch);
}
extern "C" __global__ void __launch_bounds__(32) bench_inline_small(const __grid_constant__ InlineLaunch launch) {
  copy_inline<kSmallUnit, kSmallStages>(launch);
}

extern "C" __global__ void __launch_bounds__(32)
    bench_resident_large(const Ring* ring, uint64_t* finished, uint64_t page_bytes, uint64_t life_ns) {
  stay<kLargeUnit, kLargeStages>(ring, finished, page_bytes, life_ns);
}
extern "C" __global__ void __launch_bounds__(32)
    bench_resident_small(const Ring* ring, uint64_t* finished, uint64_t page_bytes, uint64_t life_ns) {
  stay<kSmallUnit, kSmallStages>(ring, finished, page_bytes, life_ns);
}

extern "C" __global__ void __launch_bounds__(32)
    bench_waiting_small(const WaitingLaunch* launch, uint64_t page_bytes, uint64_t* finished, uint64_t sequence) {
  extern __shared__ __align__(128) unsigned char stages[];
  __shared__ uint64_t barriers[kSmallStages];
  __shared__ PageCopy tile[kInlinePages];
  const uint32_t lane = threadIdx.x;
  const auto count = static_cast<uint32_t>(*const_cast<const volatile uint64_t*>(&launch->count));
  const PageCopy first = look(&launch->pages[lane]);  // with the count, and not after it
  const PageCopy second = look(&launch->pages[lane + 32]);
  tile[lane] = first;
  tile[lane + 32] = second;
  if (lane == 0) begin_barriers<kSmallUnit, kSmallStages>(barriers);
  __syncwarp();
  if (lane != 0) return;
  const Range range = range_of_block<kSmallUnit>(page_bytes, count);
  uint32_t turn = 0;
  copy_units<kSmallUnit, kSmallStages>([&](uint32_t i) { return tile[i]; }, page_bytes, range.begin, range.end, stages,
                                       barriers, turn);
  __threadfence_system();
  store_relaxed(&finished[blockIdx.x], sequence);
}

// kvc_copy_bulk with times, for launches of at most kTilePages pages a block.
extern "C" __global__ void __launch_bounds__(32)
    bench_copy_timed(const __grid_constant__ cuda::CopyLaunch launch, BlockTimes* times) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto* tile = reinterpret_cast<PageCopy*>(shared + kLargeShared);
  auto* barriers = reinterpret_cast<uint64_t*>(tile + cuda::kTilePages);
  BlockTimes mine;
  const auto note = [&](Moment moment) {
    mine.nanoseconds[moment] = nanoseconds();
    mine.cycles[moment] = clock64();
  };
  note(kBegun);
  if (threadIdx.x == 0) begin_barriers<kLargeUnit, kLargeStages>(barriers);
  const uint64_t units = launch.units;
  const auto begin = static_cast<uint32_t>(units * blockIdx.x / gridDim.x);
  const auto end = static_cast<uint32_t>(units * (blockIdx.x + 1) / gridDim.x);
  const uint32_t first = begin / launch.units_per_page;
  const uint32_t pages = end > begin ? (end - 1) / launch.units_per_page + 1 - first : 0;
  for (uint32_t i = threadIdx.x; i < min(pages, cuda::kTilePages); i += 32) tile[i] = launch.pages[first + i];
  __syncwarp();
  if (threadIdx.x != 0) return;
  note(kListRead);
  uint32_t turn = 0;
  copy_units<kLargeUnit, kLargeStages>([&](uint32_t i) { return tile[i - first]; }, launch.page_bytes, begin, end,
                                       shared, barriers, turn);
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

// `out` in pinned memory: how much the GPU's clock has advanced from one of its steps to the next, and over how many of
// the SM's cycles the last of 64 steps came.
extern "C" __global__ void bench_clock_steps(uint64_t* out) {
  const uint64_t begin = nanoseconds();
  const uint64_t first_cycle = clock64();
  uint64_t now = begin;
  for (uint32_t steps = 0; steps < 64;) {
    const uint64_t next = nanoseconds();
    if (next != now) ++steps;
    now = next;
  }
  // Long enough for the cycles in a microsecond.
  while (nanoseconds() - begin < 200000) {
  }
  out[0] = (now - begin) / 64;
  out[1] = nanoseconds() - begin;
  out[2] = clock64() - first_cycle;
}

// A block's share of a matrix product, as far as an SM's time and room go.
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

// As decode does: reads memory once, as fast as it comes.
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
