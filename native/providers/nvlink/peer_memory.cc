#include "providers/nvlink/peer_memory.h"

#include <utility>

#include "providers/nvlink/wire.h"

namespace kvc::nvlink {

namespace {

constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

class IpcAllocation final : public PeerAllocation {
 public:
  IpcAllocation(std::shared_ptr<cuda::Context> context, cuda::DevicePointer base)
      : context_(std::move(context)), base_(base) {}
  ~IpcAllocation() override {
    const cuda::Context::Scope scope(*context_);
    context_->driver().cuIpcCloseMemHandle(base_);
  }
  cuda::DevicePointer base() const noexcept override { return base_; }

 private:
  const std::shared_ptr<cuda::Context> context_;
  const cuda::DevicePointer base_;
};

}  // namespace

Result<std::shared_ptr<PeerAllocation>> PeerMemory::open(const std::shared_ptr<cuda::Context>& context,
                                                         const cuda::IpcHandle& handle) {
  std::erase_if(open_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<PeerAllocation>& known = open_[handle.bytes];
  if (std::shared_ptr<PeerAllocation> mapped = known.lock()) return mapped;
  const cuda::Context::Scope scope(*context);
  cuda::DevicePointer base = 0;
  if (int result = context->driver().cuIpcOpenMemHandle_v2(&base, handle, kLazyPeerAccess); result != cuda::kSuccess) {
    Error error = cannot_be_mapped(cuda::cuda_error("accept", "cuIpcOpenMemHandle", result));
    error.message += "; containers need one IPC namespace (--ipc=host)";
    return error;
  }
  const auto mapped = std::make_shared<IpcAllocation>(context, base);
  known = mapped;
  return std::shared_ptr<PeerAllocation>(mapped);
}

Error cannot_be_mapped(Error error) {
  error = kLane.named(std::move(error));
  error.code = ErrorCode::kRefused;
  error.message +=
      ": the peer's GPU memory cannot be mapped here. GPUs without peer access to each other need another lane";
  return error;
}

}  // namespace kvc::nvlink
