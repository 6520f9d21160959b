// PeerMemory: access of one domain's GPU to the memory of other GPUs and of other processes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "base/error.h"
#include "cuda/driver.h"

namespace kvc::nvlink {

// An allocation of another process that CUDA IPC has mapped here. The destructor unmaps it. It must run after all
// copies, and before the owner frees the allocation: CUDA leaves the effect on the mapping, and on copies into it,
// undefined otherwise.
class IpcMapping {
 public:
  IpcMapping(std::shared_ptr<cuda::Context> context, cuda::DevicePointer base, uint64_t bytes)
      : base(base), bytes(bytes), context_(std::move(context)) {}
  IpcMapping(const IpcMapping&) = delete;
  IpcMapping& operator=(const IpcMapping&) = delete;
  ~IpcMapping();

  const cuda::DevicePointer base;
  const uint64_t bytes;  // bytes that may be written, counted from `base`

 private:
  const std::shared_ptr<cuda::Context> context_;
};

// Used on the control thread only. Every call blocks: a mapping takes 50 to 250 us (H100), and its end as long.
class PeerMemory {
 public:
  explicit PeerMemory(std::shared_ptr<cuda::Context> context) : context_(std::move(context)) {}

  const std::shared_ptr<cuda::Context>& context() const noexcept { return context_; }
  // Maps `handle`, or returns its mapping: regions of one allocation share it. kRefused if the two GPUs, or the two
  // processes, cannot share memory.
  Result<std::shared_ptr<IpcMapping>> open(const cuda::IpcHandle& handle);
  // Lets our GPU write memory of this process: memory of another of its GPUs, or pieces there.
  Status reach_gpu(int device) const;
  Status reach_pieces(cuda::DevicePointer base, uint64_t bytes) const;

 private:
  const std::shared_ptr<cuda::Context> context_;
  std::map<std::array<std::byte, 64>, std::weak_ptr<IpcMapping>> open_;
};

// Returns the driver's error for a peer's memory that it did not map, as an Error of this lane with advice.
Error cannot_be_mapped(Error error);

}  // namespace kvc::nvlink
