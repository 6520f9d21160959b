// Group: a rank's part in the expert exchange of a mixture-of-experts layer. Dispatch sends each token's row to the ranks
// that own one of its experts; combine brings the sum of their results back.
//
// The row of token t of source s is number (sizes before s) + t on every rank. Each slot runs dispatch, the experts,
// combine, and dispatch again, on one stream; that order is why no barrier and no second buffer is needed.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "cuda/moe.h"
#include "engine/error.h"
#include "engine/unique_fd.h"
#include "moe/layout.h"
#include "moe/segment.h"

namespace kvc::moe {

struct GroupConfig {
  uint32_t rank = 0;
  uint32_t ranks = 1;           // up to kMaxRanks
  int device = -1;              // the GPU's ordinal among the visible ones; -1: host memory
  uint64_t dispatch_bytes = 0;  // of a slot: all columns of all ranks' rows
  uint64_t combine_bytes = 0;   // of a slot: the results for all ranks' rows
  uint32_t max_tokens = 0;      // of one rank in a step
  uint32_t experts = 0;
  uint32_t slots = 1;
  uint64_t timeout_ns = 0;  // the longest wait of a launch for another rank
};

// What a caller says of a column; the rest follows from the sizes.
struct ColumnSpec {
  const void* source = nullptr;  // [tokens][row_bytes]
  uint32_t row_bytes = 0;
  uint64_t offset = 0;  // of the column in the dispatch area, a multiple of kColumnAlignment
  bool to_all = false;
};

// One thread at a time, but for lose() and fault(), which any thread may call. On a GPU dispatch() and combine() enqueue
// and return; they allocate nothing, so they can be captured into CUDA graphs. On host memory they return when all ranks'
// rows or results are there.
class Group {
 public:
  static Result<std::unique_ptr<Group>> create(const GroupConfig& config);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  // Closes it, for up to 2 s. Where a GPU does not come to rest, its memory is not freed.
  ~Group();

  uint64_t segment_bytes() const noexcept { return layout_.bytes(config_.slots); }
  unsigned char* base() const noexcept;
  const Layout& layout() const noexcept { return layout_; }

  // A descriptor of this rank's segment, for attach() at every other rank.
  Result<UniqueFd> descriptor() const;
  // `descriptor` stays the caller's. Before the first dispatch.
  Status attach(uint32_t rank, int descriptor);
  // The rank of each expert; empty: every row goes to every rank. No launch may be in flight.
  Status place(std::span<const uint32_t> owners);

  // `ids`: [tokens][top_k] of ids_bytes each (4 or 8). The memory of the columns and ids is read until the launch is over.
  Status dispatch(cuda::Stream stream, uint32_t slot, std::span<const uint32_t> sizes, const void* ids,
                  uint32_t ids_bytes, uint32_t top_k, std::span<const ColumnSpec> columns, uint32_t phases);
  // `out`: [tokens][hidden] of bf16, the sums in rank order. `sizes` are those of the slot's last dispatch.
  Status combine(cuda::Stream stream, uint32_t slot, std::span<const uint32_t> sizes, void* out, uint32_t hidden,
                 bool accumulate, uint32_t phases);

  // The host found `rank` gone: launches that wait for it end.
  void lose(uint32_t rank);
  // Why a launch gave up, and the rank that it had waited for. From then on no launch does anything.
  std::optional<std::pair<Fault, uint32_t>> fault() const;

  // Ends all waiting, waits until the GPU is at rest, and frees everything. kTimeout: it does not come to rest; nothing is
  // freed then, as the GPU may still use it. A second call does nothing.
  Status close(uint64_t timeout_ns);

 private:
  struct Memory;  // everything that a launch may touch
  Group(const GroupConfig& config, std::unique_ptr<Memory> memory);
  Result<std::pair<uint64_t, uint64_t>> rows(std::string_view operation, uint32_t slot,
                                             std::span<const uint32_t> sizes) const;
  Status launch(cuda::Function kernel, cuda::Stream stream, uint32_t blocks, uint32_t threads, void* arguments);

  GroupConfig config_;
  Layout layout_;
  mutable std::mutex mutex_;  // what close() takes away from lose() and fault()
  std::unique_ptr<Memory> memory_;
};

}  // namespace kvc::moe
