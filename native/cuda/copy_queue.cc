#include "cuda/copy_queue.h"

#include <string>

namespace kvc::cuda {

Result<std::shared_ptr<Copier>> DomainGpu::adopt(int device) {
  if (context_ != nullptr && context_->device() != device) {
    return Error{ErrorCode::kInvalidArgument,
                 "cuda",
                 {},
                 "register_memory",
                 "this memory is on GPU " + std::to_string(device) + " and earlier memory is on GPU " +
                     std::to_string(context_->device()) + ": one engine serves one GPU"};
  }
  if (copier_ != nullptr) return copier_;
  Result<std::shared_ptr<Context>> context = Context::retain(device);
  if (!context) return context.error();
  Result<std::unique_ptr<Copier>> copier = Copier::open(context.value(), copy_blocks_);
  if (!copier) return copier.error();
  context_ = std::move(context.value());
  copier_ = std::move(copier.value());
  return copier_;
}

}  // namespace kvc::cuda
