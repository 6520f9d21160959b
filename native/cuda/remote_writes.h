// RemoteWrites: makes NIC writes into one GPU's memory (GPUDirect RDMA) visible to kernels that are running on that
// GPU.
//
// By CUDA's rules, a kernel that is launched after a transfer was counted sees the bytes. A kernel that is running
// already and polls a word sees them in two cases only. Either the GPU keeps remote writes in order (Hopper does for
// its own kernels, as an H100 reports), or a flush comes before the store of the word.
#pragma once

#include <memory>
#include <utility>

#include "base/error.h"
#include "cuda/driver.h"

namespace kvc::cuda {

class RemoteWrites {
 public:
  // For the GPU of `context`. kRefused: the GPU neither keeps the order nor supports the flush.
  static Result<RemoteWrites> of(std::shared_ptr<Context> context);

  // Makes everything visible to running kernels that a completion has reported before. Any thread. Does nothing if the
  // GPU keeps the order. Otherwise a driver call waits for the flush.
  Status flush() const;

 private:
  RemoteWrites(std::shared_ptr<Context> context, bool ordered) : context_(std::move(context)), ordered_(ordered) {}

  std::shared_ptr<Context> context_;
  bool ordered_;
};

}  // namespace kvc::cuda
