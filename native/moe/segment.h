// Segment: a rank's symmetric memory, or the mapping of a peer's in this process.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "cuda/driver.h"
#include "cuda/moe_launch.h"
#include "cuda/virtual_memory.h"

namespace kvc::moe {

// Memory that other processes map by a descriptor. One thread at a time. No call waits for kernels.
class Segment {
 public:
  virtual ~Segment() = default;

  // Creates a segment of zeros. `context` is the GPU's context; null: host memory. On a GPU, it is one piece of virtual
  // memory, which lives as long as a peer maps it. `bytes` may be rounded up.
  static Result<std::unique_ptr<Segment>> create(std::shared_ptr<cuda::Context> context, uint64_t bytes);
  // Maps another process's segment. kInvalidArgument: it has fewer than `bytes`. kNotReachable: this GPU cannot reach
  // that GPU.
  static Result<std::unique_ptr<Segment>> map(std::shared_ptr<cuda::Context> context, int descriptor, uint64_t bytes);

  unsigned char* base() const noexcept { return base_; }
  uint64_t bytes() const noexcept { return bytes_; }
  // Maps another process's segment at the same addresses, in place of this one. After an error, nothing may be mapped
  // there. Not for segments created here.
  virtual Status replace(int descriptor) = 0;
  // Returns a descriptor for peers. Only segments created here have one.
  virtual Result<UniqueFd> descriptor() const = 0;

 protected:
  Segment(unsigned char* base, uint64_t bytes) : base_(base), bytes_(bytes) {}
  unsigned char* base_;
  uint64_t bytes_;
};

}  // namespace kvc::moe
