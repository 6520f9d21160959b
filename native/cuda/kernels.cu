// Copy kernels (scattered pages from local memory into a peer GPU's memory), kernels that write a signal's word, and the
// kernel of page sums.
//
// A block copies a contiguous range of a launch's units. The last block writes the launch's number into pinned host
// memory. Completion therefore needs neither an event nor a second operation on the stream.

#include "base/page_sum.h"
#include "cuda/kernels.h"
#include "cuda/moe_kernels.cuh"

namespace kvc::cuda {
namespace {

struct Range {
  uint32_t begin;
  uint32_t end;
};

__device__ Range range_of_block(const CopyLaunch& launch) {
  const uint64_t units = launch.units;
  return {static_cast<uint32_t>(units * blockIdx.x / gridDim.x),
          static_cast<uint32_t>(units * (blockIdx.x + 1) / gridDim.x)};
}

__device__ void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Called once per block, by one thread that has seen all writes of the block complete.
__device__ void finish_block(const CopyLaunch& launch) {
  __threadfence_system();
  if (atomicAdd(launch.blocks_done, 1U) + 1 < gridDim.x) return;
  *launch.blocks_done = 0;
  __threadfence_system();
  store_release(launch.finished, launch.sequence);
}

__device__ uint32_t unit_bytes(const CopyLaunch& launch, uint32_t part) {
  const uint64_t left = launch.page_bytes - static_cast<uint64_t>(part) * kUnitBytes;
  return left < kUnitBytes ? static_cast<uint32_t>(left) : kUnitBytes;
}

}  // namespace

// For Hopper and later. The bulk copy engine moves each unit through shared memory, and one thread issues all
// operations. Addresses and page_bytes must be multiples of 16.
extern "C" __global__ void __launch_bounds__(kBulkThreads) kvc_copy_bulk(const __grid_constant__ CopyLaunch launch) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  auto* tile = reinterpret_cast<PageCopy*>(shared + kStages * kUnitBytes);
  auto* barriers = reinterpret_cast<uint64_t*>(tile + kTilePages);
  auto* targets = barriers + kStages;
  auto* lengths = reinterpret_cast<uint32_t*>(targets + kStages);
  const auto address = [](const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); };

  const Range range = range_of_block(launch);
  const uint32_t count = range.end - range.begin;
  const bool leader = threadIdx.x == 0;
  if (leader) {
    for (uint32_t stage = 0; stage < kStages; ++stage) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&barriers[stage])) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();

  uint32_t tile_first = 0;
  uint32_t tile_end = 0;  // end of the launch's pages that the tile holds now
  const uint32_t last_page = count > 0 ? (range.end - 1) / launch.units_per_page : 0;
  const auto load = [&](uint32_t index) {
    const uint32_t unit = range.begin + index;
    const uint32_t page = unit / launch.units_per_page;
    if (page >= tile_end) {
      __syncwarp();
      tile_first = page;
      tile_end = min(page + kTilePages, last_page + 1);
      for (uint32_t i = threadIdx.x; i < tile_end - tile_first; i += kBulkThreads) {
        tile[i] = launch.pages[tile_first + i];
      }
      __syncwarp();
    }
    if (!leader) return;
    const uint32_t part = unit % launch.units_per_page;
    const PageCopy copy = tile[page - tile_first];
    const uint64_t offset = static_cast<uint64_t>(part) * kUnitBytes;
    const uint32_t bytes = unit_bytes(launch, part);
    const uint32_t stage = index % kStages;
    targets[stage] = copy.target + offset;
    lengths[stage] = bytes;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barriers[stage])), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address(shared + stage * kUnitBytes)),
                 "l"(copy.source + offset), "r"(bytes), "r"(address(&barriers[stage]))
                 : "memory");
  };

  constexpr uint32_t kLoadsAhead = kStages - kStoresInFlight;
  for (uint32_t index = 0; index < min(count, kLoadsAhead); ++index) load(index);
  for (uint32_t index = 0; index < count; ++index) {
    if (leader) {
      const uint32_t stage = index % kStages;
      const uint32_t parity = index / kStages % 2;
      asm volatile(
          "{\n"
          ".reg .pred ready;\n"
          "again:\n"
          "mbarrier.try_wait.parity.shared::cta.b64 ready, [%0], %1;\n"
          "@!ready bra again;\n"
          "}\n" ::"r"(address(&barriers[stage])),
          "r"(parity)
          : "memory");
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(targets[stage]),
                   "r"(address(shared + stage * kUnitBytes)), "r"(lengths[stage])
                   : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      // The stage of the next load was stored kStoresInFlight units ago.
      asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStoresInFlight) : "memory");
    }
    if (index + kLoadsAhead < count) load(index + kLoadsAhead);
  }
  if (leader) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    finish_block(launch);
  }
#endif
}

// For all other cases: GPUs before Hopper, and pages that are not multiples of 16 bytes.
extern "C" __global__ void __launch_bounds__(kVectorThreads)
    kvc_copy_vector(const __grid_constant__ CopyLaunch launch) {
  __shared__ PageCopy tile[kTilePages];
  const Range range = range_of_block(launch);
  const uint32_t last_page = range.end > range.begin ? (range.end - 1) / launch.units_per_page : 0;
  uint32_t tile_first = 0;
  uint32_t tile_end = 0;
  for (uint32_t unit = range.begin; unit < range.end; ++unit) {
    const uint32_t page = unit / launch.units_per_page;
    if (page >= tile_end) {
      __syncthreads();
      tile_first = page;
      tile_end = min(page + kTilePages, last_page + 1);
      for (uint32_t i = threadIdx.x; i < tile_end - tile_first; i += kVectorThreads) {
        tile[i] = launch.pages[tile_first + i];
      }
      __syncthreads();
    }
    const uint32_t part = unit % launch.units_per_page;
    const PageCopy copy = tile[page - tile_first];
    const uint64_t source = copy.source + static_cast<uint64_t>(part) * kUnitBytes;
    const uint64_t target = copy.target + static_cast<uint64_t>(part) * kUnitBytes;
    const uint32_t bytes = unit_bytes(launch, part);
    if (((source | target | bytes) & 15) == 0) {
      const auto* from = reinterpret_cast<const uint4*>(source);
      auto* to = reinterpret_cast<uint4*>(target);
      // kUnitBytes is two vectors per thread. Both are loaded before the first one is stored.
      static_assert(kUnitBytes == 2 * 16 * kVectorThreads);
      const uint32_t vectors = bytes / 16;
      const uint32_t first = threadIdx.x;
      const uint32_t second = threadIdx.x + kVectorThreads;
      uint4 a{};
      uint4 b{};
      if (first < vectors) a = from[first];
      if (second < vectors) b = from[second];
      if (first < vectors) to[first] = a;
      if (second < vectors) to[second] = b;
    } else {
      const auto* from = reinterpret_cast<const unsigned char*>(source);
      auto* to = reinterpret_cast<unsigned char*>(target);
      for (uint32_t i = threadIdx.x; i < bytes; i += kVectorThreads) to[i] = from[i];
    }
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) finish_block(launch);
}

// Sums of pages (base/page_sum.h). Each block sums one page after the other, a vector of 16 bytes per thread and turn.
extern "C" __global__ void __launch_bounds__(kSumThreads) kvc_page_sums(const __grid_constant__ PageSums pages) {
  __shared__ uint64_t of_warps[kSumThreads / 32];
  const uint64_t count = static_cast<uint64_t>(pages.layer_count) * pages.block_count;
  const uint32_t run_words = static_cast<uint32_t>((pages.run_bytes + 7) / 8);
  for (uint64_t page = blockIdx.x; page < count; page += gridDim.x) {
    const uint64_t base = pages.layers[page / pages.block_count] + pages.blocks[page % pages.block_count] * pages.stride;
    uint64_t sum = 0;
    uint64_t places = base | pages.run_bytes;
    for (uint32_t run = 0; run < pages.run_count; ++run) places |= pages.runs[run];
    if ((places & 15) == 0) {
      const uint32_t run_vectors = run_words / 2;
#pragma unroll 4
      for (uint32_t i = threadIdx.x; i < pages.run_count * run_vectors; i += kSumThreads) {
        const uint32_t run = pages.run_count == 1 ? 0 : i / run_vectors;
        const auto* vectors = reinterpret_cast<const ulonglong2*>(base + pages.runs[run]);
        const ulonglong2 two = vectors[i - run * run_vectors];
        const uint64_t place = (2 * static_cast<uint64_t>(i) + 1) * kWordStep;
        sum += mix_word(two.x, place) + mix_word(two.y, place + kWordStep);
      }
    } else {
      for (uint32_t i = threadIdx.x; i < pages.run_count * run_words; i += kSumThreads) {
        const uint32_t run = i / run_words;
        const uint64_t offset = static_cast<uint64_t>(i - run * run_words) * 8;
        const auto* bytes = reinterpret_cast<const unsigned char*>(base + pages.runs[run] + offset);
        uint64_t word = 0;
        for (uint64_t k = 0; k < 8 && offset + k < pages.run_bytes; ++k) word |= uint64_t{bytes[k]} << (8 * k);
        sum += mix_word(word, (i + uint64_t{1}) * kWordStep);
      }
    }
    for (uint32_t distance = 16; distance > 0; distance /= 2) sum += __shfl_down_sync(~0U, sum, distance);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (uint32_t warp = 1; warp < kSumThreads / 32; ++warp) sum += of_warps[warp];
      pages.sums[page] = sum;
    }
    __syncthreads();
  }
}

// Stores the word of a LayerSignal, for drivers that cannot write 64-bit words from a stream.
extern "C" __global__ void kvc_signal_store(uint64_t* word, uint64_t value) {
  __threadfence_system();
  store_release(word, value);
}

// Raises the word by one. A CUDA graph captures it, so that every replay advances the word. The stream is the only
// writer, so no change is lost between the load and the store.
extern "C" __global__ void kvc_signal_advance(uint64_t* word) {
  __threadfence_system();
  uint64_t value = 0;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  store_release(word, value + 1);
}

// For measurements (native/bench/gpu): stores the GPU's clock in ns, read once `*gate` has reached `value`.
extern "C" __global__ void kvc_stamp(uint64_t* out, const uint64_t* gate, uint64_t value) {
  uint64_t seen = 0;
  do {
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(gate) : "memory");
  } while (seen < value);
  uint64_t now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  store_release(out, now);
}

}  // namespace kvc::cuda
