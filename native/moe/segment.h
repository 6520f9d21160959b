// Segments: a rank's symmetric memory, and the mappings of its peers' in this process.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "cuda/driver.h"
#include "cuda/moe.h"
#include "cuda/virtual_memory.h"

namespace kvc::moe {

// Memory that other processes map by a descriptor. One thread at a time; no call waits for kernels.
class Segment {
 public:
  virtual ~Segment() = default;

  // Zeros. `context`: the GPU's; null: host memory. On a GPU one piece of virtual memory, which outlives its owner as long
  // as a peer has it mapped. `bytes` may be rounded up.
  static Result<std::unique_ptr<Segment>> create(std::shared_ptr<cuda::Context> context, uint64_t bytes);
  // Another process's. kInvalidArgument where it has less than `bytes`; kNotReachable where this GPU cannot reach that one.
  static Result<std::unique_ptr<Segment>> map(std::shared_ptr<cuda::Context> context, int descriptor, uint64_t bytes);

  unsigned char* base() const noexcept { return base_; }
  uint64_t bytes() const noexcept { return bytes_; }
  // A descriptor for peers; only of a segment that was created here.
  virtual Result<UniqueFd> descriptor() const = 0;

 protected:
  Segment(unsigned char* base, uint64_t bytes) : base_(base), bytes_(bytes) {}
  unsigned char* base_;
  uint64_t bytes_;
};

}  // namespace kvc::moe
