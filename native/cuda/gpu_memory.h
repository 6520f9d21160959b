// GPU memory as lanes that are no GPU's see it. Everything here asks the CUDA driver that the process has loaded
// already; in a process without one there is no GPU memory. Any thread; nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "engine/error.h"
#include "engine/unique_fd.h"

namespace kvc::cuda {

bool is_gpu_memory(const std::byte* address);

// For a lane that moves host memory only: kInvalidArgument if `address` is a GPU's.
Status refuse_gpu_memory(std::string_view provider, const std::byte* address);

// A DMA-BUF that covers the memory; the memory begins at `offset` of it. The NIC's registration keeps what it needs:
// the descriptor may be closed after it.
struct DmaBuf {
  UniqueFd fd;
  uint64_t offset = 0;
};
Result<DmaBuf> export_dma_buf(const std::byte* base, uint64_t bytes);

}  // namespace kvc::cuda
