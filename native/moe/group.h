// Group: a rank's part in the expert exchange of a mixture-of-experts layer. Dispatch sends each token's row to the ranks
// that own one of its experts; combine brings the sum of their results back.
//
// The row of token t of source s is number (sizes before s) + t on every rank. Each slot runs dispatch, the experts,
// combine, and dispatch again, on one stream; that order is why no barrier and no second buffer is needed.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/unique_fd.h"
#include "cuda/driver.h"
#include "cuda/moe.h"
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
  // The epoch before the first dispatch, the same at all ranks. Only tests set it: they begin shortly before the wrap.
  uint32_t first_epoch = 0;
};

// What a caller says of a column; the rest follows from the sizes.
struct ColumnSpec {
  const void* source = nullptr;  // [tokens][row_bytes]
  uint32_t row_bytes = 0;
  uint64_t offset = 0;  // of the column in the dispatch area, a multiple of kColumnAlignment
  bool to_all = false;
};

// Any thread may call lose(), fault() and close() at any time. Launches of different slots may come from different threads;
// a slot's come from one thread at a time. On a GPU dispatch() and combine() enqueue and return; they allocate nothing, so
// they can be captured into CUDA graphs. On host memory they return when all ranks' rows or results are there.
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
  // The rank of each expert; empty: every row goes to every rank. No launch may be in flight. A refused table changes
  // nothing. A captured launch takes part only where both placements need a table: equal blocks in rank order, and no
  // placement, are in the launch itself.
  Status place(std::span<const uint32_t> owners);

  // `ids`: [tokens][top_k] of ids_bytes each (4 or 8). The memory of the columns and ids is read until the launch is over.
  Status dispatch(cuda::Stream stream, uint32_t slot, std::span<const uint32_t> sizes, const void* ids,
                  uint32_t ids_bytes, uint32_t top_k, std::span<const ColumnSpec> columns, uint32_t phases);
  // `out`: [tokens][hidden] of bf16, the sums in rank order. `sizes` are those of the slot's last dispatch.
  Status combine(cuda::Stream stream, uint32_t slot, std::span<const uint32_t> sizes, void* out, uint32_t hidden,
                 bool accumulate, uint32_t phases);

  // The host found that `rank` ended: launches that wait end, for whomever they wait. `left`: it closed its group in good
  // order, so launches that wait for it end.
  void lose(uint32_t rank, bool left = false);
  // Why the first launch gave up, and the rank that it had waited for. From then on no launch of its slot does anything, and
  // none of the other slot waits any more.
  std::optional<std::pair<Fault, uint32_t>> fault() const;

  // Ends all waiting, also that of calls on host memory, waits until the GPU is at rest, and frees everything. kTimeout: it
  // does not come to rest; nothing is freed then, as the GPU may still use it. All later calls are refused with kClosed; a
  // second close() frees what the first could not. No stream of the process may be captured meanwhile, and no graph
  // that holds a launch may be replayed any more.
  Status close(uint64_t timeout_ns);

 private:
  struct Memory;  // everything that a launch may touch
  class Use;      // keeps close() from freeing it
  Group(const GroupConfig& config, std::unique_ptr<Memory> memory);
  static Status begin_epochs(Memory& memory, const GroupConfig& config);
  Result<std::pair<uint64_t, uint64_t>> rows(const Use& use, std::string_view operation, uint32_t slot,
                                             std::span<const uint32_t> sizes) const;
  template <typename Launch>
  Launch launch_of(Memory& memory, uint32_t slot, uint32_t tokens, uint32_t phases) const;
  static uint32_t resident(const Memory& memory, uint32_t threads) noexcept;
  Status launch(const Memory& memory, cuda::Function kernel, cuda::Stream stream, uint32_t blocks, uint32_t threads,
                void* arguments);

  GroupConfig config_;
  Layout layout_;
  mutable std::mutex mutex_;  // guards what follows; the memory itself is its users'
  std::condition_variable unused_;
  uint32_t uses_ = 0;  // calls that are in the memory
  bool closing_ = false;
  std::unique_ptr<Memory> memory_;
};

}  // namespace kvc::moe
