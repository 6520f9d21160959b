// PeerMemory: how one domain's GPU gets at the memory of other GPUs and of other processes.
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

// An allocation of another process that CUDA IPC has mapped here; unmaps it at its end, which must come after all copies,
// and before its owner frees it: CUDA leaves undefined what becomes of a mapping otherwise, and of copies into it.
class IpcMapping {
 public:
  IpcMapping(std::shared_ptr<cuda::Context> context, cuda::DevicePointer base, uint64_t bytes)
      : base(base), bytes(bytes), context_(std::move(context)) {}
  IpcMapping(const IpcMapping&) = delete;
  IpcMapping& operator=(const IpcMapping&) = delete;
  ~IpcMapping();

  const cuda::DevicePointer base;
  const uint64_t bytes;  // that may be written from there on

 private:
  const std::shared_ptr<cuda::Context> context_;
};

// The control thread. Everything here blocks: 50 to 250 us for a mapping (H100), and as long for its end.
class PeerMemory {
 public:
  explicit PeerMemory(std::shared_ptr<cuda::Context> context) : context_(std::move(context)) {}

  const std::shared_ptr<cuda::Context>& context() const noexcept { return context_; }
  // Maps `handle`, or finds it mapped: regions of one allocation share its mapping. kRefused where the two GPUs, or the two
  // processes, cannot share memory.
  Result<std::shared_ptr<IpcMapping>> open(const cuda::IpcHandle& handle);
  // Lets our GPU write memory of this process: of another of its GPUs, or pieces there.
  Status reach_gpu(int device) const;
  Status reach_pieces(cuda::DevicePointer base, uint64_t bytes) const;

 private:
  const std::shared_ptr<cuda::Context> context_;
  std::map<std::array<std::byte, 64>, std::weak_ptr<IpcMapping>> open_;
};

// What the driver said when it would not map a peer's memory, as an Error of this lane with what to do.
Error cannot_be_mapped(Error error);

}  // namespace kvc::nvlink
