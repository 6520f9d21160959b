// Memory of CUDA's virtual memory management (cuMemCreate, cuMemMap): what PyTorch's expandable segments and NCCL's
// ncclMemAlloc give out. Its owner hands it to other processes, and these map it.
//
// A range of it consists of pieces, each a physical allocation of its own, which a file descriptor names to another
// process: PyTorch's are of 20 MiB, so a KV cache of 60 GiB has 3,000. Any thread, but for what says otherwise; no
// context has to be current. No call waits for kernels that run; how long it takes was measured with an H200.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/unique_fd.h"
#include "cuda/driver.h"

namespace kvc::cuda {

struct MemoryChunk {
  DevicePointer address = 0;
  uint64_t bytes = 0;
};

// The pieces that [base, base+bytes) lies in, in their order. kInvalidArgument: not all of it is mapped, or not on one
// GPU; kRefused: a piece of it was allocated so that it has no descriptor. 2 us a piece.
Result<std::vector<MemoryChunk>> pieces_of(const Driver& driver, DevicePointer base, uint64_t bytes);

// The descriptor of the piece at `address`. It keeps the memory alive as long as it is open. 160 us.
Result<UniqueFd> export_piece(const Driver& driver, DevicePointer address);

// What the lengths of pieces are multiples of, on the context's GPU.
Result<uint64_t> piece_granularity(const Context& context);

// A piece of `bytes` on the context's GPU, as a descriptor that it lives by until it is mapped. `bytes`: a multiple of
// piece_granularity().
Result<UniqueFd> create_piece(const Context& context, uint64_t bytes);

// Lets the context's GPU read and write another GPU's pieces in this process. 40 us a piece.
Status allow_access(const Context& context, const std::vector<MemoryChunk>& pieces);

// Pieces of another process, mapped one behind the other. They stay alive although their owner may have freed them or be
// gone, so a copy that is under way cannot fault. One thread at a time; unmaps them at its end, 50 us each, which must
// come after all copies.
class PieceMapping {
 public:
  // Addresses for `bytes` of pieces.
  static Result<PieceMapping> reserve(std::shared_ptr<Context> context, uint64_t bytes);
  PieceMapping() = default;
  PieceMapping(PieceMapping&& other) noexcept { *this = std::move(other); }
  PieceMapping& operator=(PieceMapping&& other) noexcept;
  ~PieceMapping();

  DevicePointer base() const noexcept { return base_; }
  uint64_t bytes() const noexcept { return bytes_; }
  bool complete() const noexcept { return mapped_ == bytes_; }
  // Whether a piece of this length still has room.
  bool has_room(uint64_t bytes) const noexcept { return bytes > 0 && bytes <= bytes_ - mapped_; }
  // Maps the next piece, after has_room(), for the context's GPU. `descriptor` stays the caller's. 80 us.
  Status append(int descriptor, uint64_t bytes);

 private:
  void remove_last() noexcept;

  std::shared_ptr<Context> context_;
  DevicePointer base_ = 0;
  uint64_t bytes_ = 0;   // reserved
  uint64_t mapped_ = 0;  // of them, from the first on
  std::vector<uint64_t> pieces_;
};

}  // namespace kvc::cuda
