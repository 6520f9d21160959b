#include "providers/nvlink/peer_memory.h"

#include <utility>

namespace kvc::nvlink {

namespace {

constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

}  // namespace

PeerAllocation::~PeerAllocation() {
  const cuda::Context::Scope scope(*context_);
  context_->driver().cuIpcCloseMemHandle(base_);
}

Result<std::shared_ptr<PeerAllocation>> PeerMemory::open(const std::shared_ptr<cuda::Context>& context,
                                                         const cuda::IpcHandle& handle) {
  std::erase_if(open_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<PeerAllocation>& known = open_[handle.bytes];
  if (std::shared_ptr<PeerAllocation> mapped = known.lock()) return mapped;
  const cuda::Context::Scope scope(*context);
  cuda::DevicePointer base = 0;
  if (int result = context->driver().cuIpcOpenMemHandle_v2(&base, handle, kLazyPeerAccess); result != cuda::kSuccess) {
    Error error = cuda::cuda_error("accept", "cuIpcOpenMemHandle", result);
    error.code = ErrorCode::kRefused;
    error.provider = "nvlink";
    error.message +=
        ": the peer's GPU memory cannot be mapped here. GPUs without peer access to each other need another lane; "
        "containers need one IPC namespace (--ipc=host)";
    return error;
  }
  auto mapped = std::make_shared<PeerAllocation>(context, base);
  known = mapped;
  return mapped;
}

}  // namespace kvc::nvlink
