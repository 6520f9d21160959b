// PeerMemory: allocations of other processes, mapped here once each.
#pragma once

#include <map>
#include <memory>

#include "cuda/driver.h"
#include "engine/error.h"

namespace kvc::nvlink {

// A peer's allocation in this process's address space; unmaps itself. It keeps the memory alive although the peer may
// have freed it or be gone, so a copy that is under way cannot fault.
class PeerAllocation {
 public:
  PeerAllocation(std::shared_ptr<cuda::Context> context, cuda::DevicePointer base)
      : context_(std::move(context)), base_(base) {}
  PeerAllocation(const PeerAllocation&) = delete;
  PeerAllocation& operator=(const PeerAllocation&) = delete;
  ~PeerAllocation();
  cuda::DevicePointer base() const noexcept { return base_; }

 private:
  const std::shared_ptr<cuda::Context> context_;
  const cuda::DevicePointer base_;
};

// The peers' allocations that are mapped now. Worker thread only.
class PeerMemory {
 public:
  // Maps `handle` into `context`, or finds it mapped. Takes milliseconds the first time. kRefused where the two GPUs, or
  // the two processes, cannot share memory.
  Result<std::shared_ptr<PeerAllocation>> open(const std::shared_ptr<cuda::Context>& context,
                                               const cuda::IpcHandle& handle);

 private:
  std::map<std::array<std::byte, 64>, std::weak_ptr<PeerAllocation>> open_;
};

}  // namespace kvc::nvlink
