// GPU memory as lanes that are no GPU's see it. Everything here asks the CUDA driver that the process has loaded
// already, and loads none: in a process without one there is no GPU memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "base/unique_fd.h"

namespace kvc::cuda {

// Any thread; nothing blocks, except as said.

bool is_gpu_memory(const std::byte* address);

// Where the GPU allocation ends that `address` lies in, or the piece of it (virtual_memory.h); null: it is no GPU memory.
const std::byte* allocation_end(const std::byte* address);

// For a lane that moves host memory only: kNotReachable if `address` is a GPU's.
Status refuse_gpu_memory(std::string_view provider, const std::byte* address);

// For every lane that reads GPU memory without the GPU's streams knowing (a NIC, another process's GPU), when it is
// registered: from now on a 'synchronous' copy into the allocation at `address` is over when it returns. Otherwise CUDA
// returns from a copy of up to 64 KiB while its bytes are still on the way, and a write posted then sends what was there
// before. Memory in pieces (virtual_memory.h) knows no such attribute: for it the GPU's primary context is made to do so
// for all its memory. The first time, that blocks until the GPU is idle; drivers before CUDA 12.1 cannot, and nothing is
// done.
Status make_synchronous(const std::byte* address);

// A DMA-BUF that covers the memory; the memory begins at `offset` of it. The NIC's registration keeps what it needs:
// the descriptor may be closed after it.
struct DmaBuf {
  UniqueFd fd;
  uint64_t offset = 0;
};
Result<DmaBuf> export_dma_buf(const std::byte* base, uint64_t bytes);

}  // namespace kvc::cuda
