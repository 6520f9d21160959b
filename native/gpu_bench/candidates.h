// What the host and candidates.cu agree on: other ways to copy pages than the Copier's kernel, and kernels that keep a GPU
// busy meanwhile, for `kvc_gpu_bench latency` and `stages`. Included by nvcc and by the C++ compiler.
#pragma once

#include <cstdint>

#include "cuda/kernels.h"

namespace kvc::gpu_bench {

using cuda::PageCopy;

// Pages of one launch whose descriptors are in its arguments: 1 KiB of them.
inline constexpr uint32_t kInlinePages = 64;
// Blocks of a launch, each of which says by a word of its own that it has ended: no counter, and one fence less.
inline constexpr uint32_t kMaxBlocks = 32;

struct InlineLaunch {
  PageCopy pages[kInlinePages];
  uint64_t page_bytes;
  uint64_t sequence;
  uint64_t* finished;  // a word a block, in pinned host memory
  uint32_t count;
};

// The list of a launch that was made beforehand, and lies in pinned host memory until the stream's wait lets it begin.
struct WaitingLaunch {
  PageCopy pages[kInlinePages];
  uint64_t count;
};

// The resident kernel's ring, in pinned host memory. A slot's first page is written last. The upper 16 bits of both
// addresses are the slot's turn (8 bits, never 255) and its pages: whoever reads them has a whole descriptor.
inline constexpr uint32_t kSlots = 32;
inline constexpr uint32_t kSlotPages = 32;
inline constexpr uint64_t kStopMark = 0xffff;
constexpr uint64_t slot_mark(uint64_t number, uint32_t pages) { return (number / kSlots % 255) << 8 | pages; }
struct Ring {
  PageCopy slots[kSlots][kSlotPages];
};

// Of a large footprint, as kvc_copy_bulk has it: an SM of its own for each block; and of a small one, which fits beside
// other kernels' blocks: 16 KiB beside a product's 200.
inline constexpr uint32_t kLargeUnit = cuda::kUnitBytes;
inline constexpr uint32_t kLargeStages = cuda::kStages;
inline constexpr uint32_t kLargeShared = kLargeUnit * kLargeStages;
inline constexpr uint32_t kSmallUnit = 4 << 10;
inline constexpr uint32_t kSmallStages = 4;
inline constexpr uint32_t kSmallShared = kSmallUnit * kSmallStages;

// What each block of bench_copy_timed says of itself: the GPU's clock in ns, and its SM's in cycles.
enum Moment : uint32_t { kBegun, kListRead, kCopied, kFinished, kMoments };
struct BlockTimes {
  uint64_t nanoseconds[kMoments];
  uint64_t cycles[kMoments];
};

// A product's tile: 384 threads with 128 sums each and most of an SM's shared memory, as CUTLASS' kernels for Hopper.
inline constexpr uint32_t kProductThreads = 384;
inline constexpr uint32_t kProductShared = 200 << 10;
inline constexpr uint32_t kStreamThreads = 512;

}  // namespace kvc::gpu_bench
