#include "cuda/remote_writes.h"

namespace kvc::cuda {

namespace {

// Values from cuda.h.
constexpr int kFlushFromHost = 1;      // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST: the call in flush() works
constexpr int kOrderedForOwner = 100;  // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER; larger values: for more GPUs
constexpr int kTargetCurrent = 0;      // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
constexpr int kScopeOwner = 100;       // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER

}  // namespace

Result<RemoteWrites> RemoteWrites::of(std::shared_ptr<Context> context) {
  const bool ordered = context->attribute(kAttributeWritesOrdering) >= kOrderedForOwner;
  if (!ordered && (context->attribute(kAttributeFlushOptions) & kFlushFromHost) == 0) {
    return Error{
        ErrorCode::kRefused,
        "cuda",
        {},
        "flush",
        context->name() + " cannot make the writes of a NIC visible to running kernels: launch a kernel instead"};
  }
  return RemoteWrites(std::move(context), ordered);
}

Status RemoteWrites::flush() const {
  if (ordered_) return {};
  const Context::Scope scope(*context_);
  const int result = context_->driver().cuFlushGPUDirectRDMAWrites(kTargetCurrent, kScopeOwner);
  if (result != kSuccess) return cuda_error("flush", "cuFlushGPUDirectRDMAWrites", result);
  return {};
}

}  // namespace kvc::cuda
