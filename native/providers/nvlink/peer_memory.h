// PeerMemory: allocations of other processes, mapped here once each.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>

#include "cuda/driver.h"
#include "engine/error.h"

namespace kvc::nvlink {

// A peer's allocation in this process's address space; unmaps itself, which must come after all copies. It keeps the
// memory alive although the peer may have freed it or be gone, so a copy that is under way cannot fault.
class PeerAllocation {
 public:
  PeerAllocation() = default;
  PeerAllocation(const PeerAllocation&) = delete;
  PeerAllocation& operator=(const PeerAllocation&) = delete;
  virtual ~PeerAllocation() = default;
  virtual cuda::DevicePointer base() const noexcept = 0;
  // Unmaps a part, so that the end of a large one need not take long at once; false: there is none left.
  virtual bool unmap_part() noexcept { return false; }
};

// The peers' allocations that CUDA IPC has mapped. Worker thread only.
class PeerMemory {
 public:
  // Maps `handle` into `context`, or finds it mapped. Takes milliseconds the first time. kRefused where the two GPUs, or
  // the two processes, cannot share memory.
  Result<std::shared_ptr<PeerAllocation>> open(const std::shared_ptr<cuda::Context>& context,
                                               const cuda::IpcHandle& handle);

 private:
  std::map<std::array<std::byte, 64>, std::weak_ptr<PeerAllocation>> open_;
};

// What the driver said when it would not map a peer's memory, as an Error of this lane with what to do.
Error cannot_be_mapped(Error error);

}  // namespace kvc::nvlink
