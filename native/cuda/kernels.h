// Constants and structures that the host and kernels.cu share. Included by nvcc and by the C++ compiler.
#pragma once

#include <cstdint>

namespace kvc::cuda {

// One page of a launch: device addresses. The target's address is that of its mapping in this process.
struct PageCopy {
  uint64_t source;
  uint64_t target;
};

// The arguments of both copy kernels. All pages have one length and are cut into units of at most kUnitBytes, which the
// blocks share evenly.
struct CopyLaunch {
  const PageCopy* pages;  // in pinned host memory
  uint64_t page_bytes;
  uint32_t units_per_page;  // ceil(page_bytes / kUnitBytes)
  uint32_t units;           // of all pages
  uint32_t* blocks_done;    // in device memory; 0 before and after each launch
  uint64_t* finished;       // in pinned host memory; becomes `sequence` once every byte is visible to all readers
  uint64_t sequence;
};

// Measured on an H200: 12 stages of 16 KiB keep enough bytes in flight for 16 blocks to fill NVLink. They fit into the
// 227 KiB of shared memory that a block can have.
inline constexpr uint32_t kUnitBytes = 16 << 10;
inline constexpr uint32_t kStages = 12;
// Stages whose store may still be reading while the next loads are in flight.
inline constexpr uint32_t kStoresInFlight = 4;
// Descriptors that a block fetches at once. They cross PCIe, so each single fetch would cost a microsecond.
inline constexpr uint32_t kTilePages = 256;

// Dynamic shared memory of kvc_copy_bulk: the stages, the tile, and a barrier, a target and a length per stage.
inline constexpr uint32_t kBulkSharedBytes =
    kStages * kUnitBytes + kTilePages * sizeof(PageCopy) + kStages * (8 + 8 + 4);
// kvc_copy_bulk runs with one warp: its first lane issues the copies, and all lanes fetch descriptors.
inline constexpr uint32_t kBulkThreads = 32;
inline constexpr uint32_t kVectorThreads = 512;
// Threads of a block of kvc_page_sums.
inline constexpr uint32_t kSumThreads = 256;

}  // namespace kvc::cuda
