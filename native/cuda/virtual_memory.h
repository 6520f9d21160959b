// Memory of CUDA's virtual memory management (cuMemCreate, cuMemMap), which PyTorch's expandable segments and NCCL's
// ncclMemAlloc return. The functions export it to other processes, and map it there.
//
// A range consists of pieces. Each piece is a physical allocation, which a file descriptor names to another process.
// PyTorch's pieces have 20 MiB, so a KV cache of 60 GiB has 3,000 of them. Unless stated otherwise, any thread may call
// these functions, and no context has to be current. No call waits for running kernels. The times were measured with an
// H200.
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

// Returns the pieces that contain [base, base+bytes), in order. kInvalidArgument: a part is not mapped, or the pieces
// are on several GPUs. kRefused: a piece was allocated without support for descriptors. Takes 2 us per piece.
Result<std::vector<MemoryChunk>> pieces_of(const Driver& driver, DevicePointer base, uint64_t bytes);

// Returns the descriptor of the piece at `address`. While open, it keeps the memory alive. Takes 160 us.
Result<UniqueFd> export_piece(const Driver& driver, DevicePointer address);

// The unit of piece lengths on the context's GPU.
Result<uint64_t> piece_granularity(const Context& context);

// Creates a piece of `bytes` on the context's GPU. The returned descriptor keeps it alive until it is mapped. `bytes`
// must be a multiple of piece_granularity().
Result<UniqueFd> create_piece(const Context& context, uint64_t bytes);

// Lets the context's GPU read and write another GPU's pieces in this process. Takes 40 us per piece.
Status allow_access(const Context& context, const std::vector<MemoryChunk>& pieces);

// Pieces of another process, mapped contiguously. They stay alive even if their owner has freed them or is gone, so a
// copy in flight cannot fault. One thread at a time. The destructor unmaps the pieces, 50 us each, and must run after
// all copies.
class PieceMapping {
 public:
  // Reserves addresses for `bytes` of pieces.
  static Result<PieceMapping> reserve(std::shared_ptr<Context> context, uint64_t bytes);
  PieceMapping() = default;
  PieceMapping(PieceMapping&& other) noexcept { *this = std::move(other); }
  PieceMapping& operator=(PieceMapping&& other) noexcept;
  ~PieceMapping();

  DevicePointer base() const noexcept { return base_; }
  uint64_t bytes() const noexcept { return bytes_; }
  bool complete() const noexcept { return mapped_ == bytes_; }
  // Whether a piece of this length still fits.
  bool has_room(uint64_t bytes) const noexcept { return bytes > 0 && bytes <= bytes_ - mapped_; }
  // Maps the next piece for the context's GPU, after has_room(). `descriptor` stays the caller's. Takes 80 us.
  Status append(int descriptor, uint64_t bytes);
  // Maps another piece of the same length at the addresses of the only one. No copy of it may be in flight.
  // `descriptor` stays the caller's. After an error, the mapping may be without a piece.
  Status replace(int descriptor);

 private:
  static Result<AllocationHandle> import(const Driver& driver, int descriptor);
  // Takes over the handle.
  Status map(AllocationHandle handle, uint64_t bytes);
  void remove_last() noexcept;

  std::shared_ptr<Context> context_;
  DevicePointer base_ = 0;
  uint64_t bytes_ = 0;   // reserved
  uint64_t mapped_ = 0;  // mapped bytes, from the beginning
  std::vector<uint64_t> pieces_;
};

}  // namespace kvc::cuda
