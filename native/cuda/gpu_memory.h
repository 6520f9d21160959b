// Queries and exports of GPU memory for lanes that do not use the GPU. They use the CUDA driver that the process has
// loaded already, and load none: a process without a driver has no GPU memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "base/unique_fd.h"

namespace kvc::cuda {

// Any thread may call these functions. They do not block, except where stated.

bool is_gpu_memory(const std::byte* address);

// End of the GPU allocation, or of its piece (virtual_memory.h), that contains `address`. Null: not GPU memory.
const std::byte* allocation_end(const std::byte* address);

// For lanes of host memory only: returns kNotReachable if `address` is in GPU memory.
Status refuse_gpu_memory(std::string_view provider, const std::byte* address);

// For lanes that read GPU memory without the knowledge of the GPU's streams (a NIC, another process's GPU), at
// registration. Afterwards a 'synchronous' copy into the allocation at `address` has ended when it returns. Otherwise
// CUDA returns from a copy of up to 64 KiB while its bytes are in flight, and a write posted then would send the old
// bytes. Memory in pieces (virtual_memory.h) has no such attribute. For it, the GPU's primary context is changed to do
// so for all its memory. The first such change blocks until the GPU is idle. Drivers before CUDA 12.1 cannot do it, and
// nothing changes.
Status make_synchronous(const std::byte* address);

// A DMA-BUF that covers the memory, which begins at `offset` in it. A NIC's registration keeps what it needs, so the
// descriptor may be closed afterwards.
struct DmaBuf {
  UniqueFd fd;
  uint64_t offset = 0;
};
Result<DmaBuf> export_dma_buf(const std::byte* base, uint64_t bytes);

}  // namespace kvc::cuda
