// Group: one rank's part in the expert exchange of a mixture-of-experts layer. Dispatch sends each token's row to the
// ranks that own one of its experts. Combine returns the sum of their results.
//
// Ranks of one node map each other's segments. Ranks of other nodes exchange packets over lanes (FarRanks), which only
// groups on host memory can do.
//
// On every rank, the row of token t of source rank s has the number (sizes before s) + t. Each slot runs dispatch, the
// experts, combine, and dispatch again, on one stream. Because of that order, no barrier and no second buffer is
// needed.
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
#include "cuda/moe_launch.h"
#include "moe/group_config.h"
#include "moe/layout.h"
#include "moe/segment.h"

namespace kvc::moe {

class FarRanks;

// The caller's description of a column. The other values follow from the sizes.
struct ColumnSpec {
  const void* source = nullptr;  // [tokens][row_bytes]
  uint32_t row_bytes = 0;
  uint64_t offset = 0;  // offset of the column in the dispatch area, a multiple of kColumnAlignment
  bool to_all = false;
  bool blank = false;  // the rows of a masked rank become ones: the column of ids
};

// Any thread may call lose(), fault() and close() at any time. Different threads may launch different slots, but one
// slot takes launches of one thread at a time. On a GPU, dispatch() and combine() enqueue and return. They allocate
// nothing, so CUDA graphs can capture them. On host memory, they return when the rows or results of all ranks have
// arrived.
class Group {
 public:
  static Result<std::unique_ptr<Group>> create(const GroupConfig& config);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  // Calls close() with 2 s. If a GPU does not finish its work in that time, its memory is not freed.
  ~Group();

  uint64_t segment_bytes() const noexcept { return layout_.bytes(config_.slots); }
  unsigned char* base() const noexcept;
  const Layout& layout() const noexcept { return layout_; }

  // Returns a descriptor of this rank's segment, for attach() on every other rank.
  Result<UniqueFd> descriptor() const;
  // Maps the segment of `rank`. `descriptor` stays the caller's. To be called before the first dispatch.
  Status attach(uint32_t rank, int descriptor);
  // Reaches the ranks of other nodes by `far`, which must live until close() has succeeded. Each other rank is either
  // attached or far. To be called before the first dispatch.
  Status join(FarRanks& far);
  // Sets the rank of each expert. Empty: every row goes to every rank. No launch may be in flight. A refused table
  // changes nothing. A captured launch uses a new placement only if the old and the new one both need a table. Equal
  // blocks in rank order, and no placement, are stored in the launch itself.
  Status place(std::span<const uint32_t> owners);

  // `ids`: [tokens][top_k], of ids_bytes each (4 or 8). The memory of the columns and ids is read until the launch has
  // ended.
  Status dispatch(cuda::Stream stream, uint32_t slot, std::span<const uint32_t> sizes, const void* ids,
                  uint32_t ids_bytes, uint32_t top_k, std::span<const ColumnSpec> columns, uint32_t phases);
  // `out`: [tokens][hidden] of bf16, the sums in rank order. `sizes` must equal those of the slot's last dispatch.
  // In a group that survives, the launch ends with kEvicted if another rank went on without this rank before its end.
  // `out` is void then. Results that are missing in `out` are those of ranks that masked() names.
  Status combine(cuda::Stream stream, uint32_t slot, std::span<const uint32_t> sizes, void* out, uint32_t hidden,
                 bool accumulate, uint32_t phases);

  // The epoch of each slot: the number of dispatches that were sent. No launch may be in flight.
  Result<std::vector<uint32_t>> epochs() const;
  // Begins with these epochs, as if earlier dispatches had ended: a new process begins where the group is. To be called
  // before the first dispatch, and before other ranks store into this rank's segment.
  Status begin(std::span<const uint32_t> epochs);
  // For groups that survive: prepares to go on with a new process in place of a masked rank, whose process has ended.
  // `descriptor` is that of the new segment, and stays the caller's. No launch may be in flight until admit() or
  // cancel_admission(). An error changes nothing: launches go on without the rank. After success the new process may
  // store into this rank's segment.
  Status prepare_admission(uint32_t rank, int descriptor);
  void cancel_admission();
  // Goes on with the prepared rank. Fails only if none is prepared or another call is running. False: the new segment
  // has other addresses than the old one, so graphs with launches of this group must be captured again.
  Result<bool> admit();

  // Reports that `rank` ended: all waiting launches end, whichever rank they wait for, and name it. Later reports change
  // nothing. `rank` may be this rank, if the others continue without it. `left`: the rank closed its group in good
  // order, so only launches that wait for it end.
  // A group that survives: launches that wait for another rank go on without it. Its own launches, and those after it
  // left in good order, end as in every group.
  void lose(uint32_t rank, bool left = false);
  // For groups that survive: reports that the process of `rank` has ended, with its use of the GPU. Before that, no
  // dispatch begins after a launch went on without the rank. Stores of the rank could land in the step's rows.
  void fence(uint32_t rank);
  // The ranks that a launch went on without, one bit for each.
  uint32_t masked() const;
  // The reason why the first launch gave up, and the rank that it waited for. After a fault, launches of the same slot
  // do nothing, and launches of the other slot stop waiting.
  std::optional<std::pair<Fault, uint32_t>> fault() const;

  // Ends all waiting, also in calls on host memory, waits until the GPU is idle, and frees everything. kTimeout: the
  // GPU did not become idle, and nothing is freed, because the GPU may still use it. All later calls return kClosed. A
  // second close() frees what the first one could not. Meanwhile no stream of the process may be captured, and no graph
  // with a launch of this group may be replayed.
  Status close(uint64_t timeout_ns);

 private:
  struct Memory;  // everything that a launch may use
  class Use;      // keeps close() from freeing the memory
  Group(const GroupConfig& config, std::unique_ptr<Memory> memory);
  static Status begin_epochs(Memory& memory, const GroupConfig& config, std::span<const uint32_t> epochs);
  std::string refusal(Memory& memory, uint32_t rank) const;
  Result<std::pair<uint64_t, uint64_t>> rows(const Use& use, std::string_view operation, uint32_t slot,
                                             std::span<const uint32_t> sizes) const;
  template <typename Launch>
  Launch launch_of(Memory& memory, uint32_t slot, uint32_t tokens, uint32_t phases) const;
  static uint32_t resident(const Memory& memory, uint32_t threads) noexcept;
  Status launch(const Memory& memory, cuda::Function kernel, cuda::Stream stream, uint32_t blocks, uint32_t threads,
                void* arguments);

  GroupConfig config_;
  Layout layout_;
  mutable std::mutex mutex_;  // guards the following fields; the memory itself is guarded by its users
  std::condition_variable unused_;
  uint32_t uses_ = 0;  // calls that are using the memory
  bool closing_ = false;
  std::unique_ptr<Memory> memory_;
};

}  // namespace kvc::moe
