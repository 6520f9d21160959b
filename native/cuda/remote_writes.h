// RemoteWrites: what NICs write into one GPU's memory (GPUDirect RDMA), for kernels that are running there meanwhile.
//
// A kernel that is launched after a transfer was counted sees its bytes: that is CUDA's rule. One that runs already and
// polls a word does so only where the GPU keeps remote writes in order (Hopper does for its own kernels, as an H100
// says), or is told to flush them before the word is stored.
#pragma once

#include <memory>
#include <utility>

#include "base/error.h"
#include "cuda/driver.h"

namespace kvc::cuda {

class RemoteWrites {
 public:
  // Of the context's GPU. kRefused: neither can be had there.
  static Result<RemoteWrites> of(std::shared_ptr<Context> context);

  // Any thread. What a completion has told of before is visible to the GPU's running kernels afterwards. Nothing to do
  // where the GPU keeps order; else a call of the driver's that waits for the flush.
  Status flush() const;

 private:
  RemoteWrites(std::shared_ptr<Context> context, bool ordered) : context_(std::move(context)), ordered_(ordered) {}

  std::shared_ptr<Context> context_;
  bool ordered_;
};

}  // namespace kvc::cuda
