#include "providers/nvlink/peer_memory.h"

#include <bit>
#include <vector>

#include "cuda/virtual_memory.h"
#include "providers/nvlink/wire.h"

namespace kvc::nvlink {

namespace {

constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

}  // namespace

IpcMapping::~IpcMapping() {
  const cuda::Context::Scope scope(*context_);
  context_->driver().cuIpcCloseMemHandle(base);
}

Result<std::shared_ptr<IpcMapping>> PeerMemory::open(const cuda::IpcHandle& handle) {
  std::weak_ptr<IpcMapping>& known = open_[handle.bytes];
  if (std::shared_ptr<IpcMapping> mapped = known.lock()) return mapped;
  const cuda::Context::Scope scope(*context_);
  cuda::DevicePointer base = 0;
  const int result = context_->driver().cuIpcOpenMemHandle_v2(&base, handle, kLazyPeerAccess);
  if (result != cuda::kSuccess) {
    open_.erase(handle.bytes);
    Error error = cannot_be_mapped(cuda::cuda_error("accept", "cuIpcOpenMemHandle", result));
    error.message += "; containers need one IPC namespace (--ipc=host)";
    return error;
  }
  // If the driver does not report the allocation's size, the peer's number is used.
  const Result<cuda::Placement> placed =
      cuda::placement(context_->driver(), reinterpret_cast<const void*>(base));  // NOLINT(performance-no-int-to-ptr)
  const bool told = placed.ok() && placed.value().allocation_bytes != 0;
  const uint64_t bytes = told ? placed.value().allocation + placed.value().allocation_bytes - base : UINT64_MAX;
  const auto mapped = std::make_shared<IpcMapping>(context_, base, bytes);
  known = mapped;
  // Expired entries are erased only now and then, because thousands of allocations arrive one after the other.
  if (std::has_single_bit(open_.size())) std::erase_if(open_, [](const auto& entry) { return entry.second.expired(); });
  return mapped;
}

Status PeerMemory::reach_gpu(int device) const {
  if (device == context_->device()) return {};
  Result<std::shared_ptr<cuda::Context>> other = cuda::Context::retain(device);
  if (!other) return kLane.named(other.error());
  const cuda::Context::Scope scope(*context_);
  const int result = context_->driver().cuCtxEnablePeerAccess(other.value()->handle(), 0);
  if (result == cuda::kSuccess || result == cuda::kPeerAccessAlreadyEnabled) return {};
  Error error = kLane.named(cuda::cuda_error("accept", "cuCtxEnablePeerAccess", result));
  error.code = ErrorCode::kRefused;
  return error;
}

Status PeerMemory::reach_pieces(cuda::DevicePointer base, uint64_t bytes) const {
  const Result<std::vector<cuda::MemoryChunk>> pieces = cuda::pieces_of(context_->driver(), base, bytes);
  if (!pieces) return kLane.named(pieces.error());
  if (Status allowed = cuda::allow_access(*context_, pieces.value()); !allowed) {
    return cannot_be_mapped(allowed.error());
  }
  return {};
}

Error cannot_be_mapped(Error error) {
  error = kLane.named(std::move(error));
  error.code = ErrorCode::kRefused;
  error.message +=
      ": the peer's GPU memory cannot be mapped here. GPUs without peer access to each other need another lane";
  return error;
}

}  // namespace kvc::nvlink
