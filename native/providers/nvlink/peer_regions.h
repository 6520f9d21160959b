// PeerRegions: the regions of one peer, with their mappings here.
//
// Mapping and unmapping block, so they run on the control thread. A PeerRegion is the state that the control thread's
// tasks and the domain share. A region that a handle names is mapped when the link is made, or when it is first looked
// up. A region in pieces is mapped as the pieces arrive.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/unique_fd.h"
#include "cuda/virtual_memory.h"
#include "lane/control_queue.h"
#include "providers/nvlink/peer_memory.h"
#include "providers/nvlink/wire.h"
#include "providers/same_host/wire.h"

namespace kvc::nvlink {

class PeerRegion {
 public:
  enum class State : uint8_t { kComing, kReady, kFailed };

  // `entry` is the peer's entry of the key `rkey`. Its words are copied, because the peer may go on writing.
  PeerRegion(uint64_t key, const RegionEntry& entry, bool same_process);

  const uint64_t rkey;
  const uint64_t bytes;
  const uint64_t pieces_bytes;  // 0: not in pieces, or pieces of this process

  // --- For the domain. All changes that precede a new state() are visible after it.
  State state() const noexcept { return state_.load(std::memory_order_acquire); }
  // The region's first address here, in state kReady.
  cuda::DevicePointer base() const noexcept { return base_; }
  // The error for batches to this region, in state kFailed.
  const Error& error() const noexcept { return *error_; }
  // Whether some of the region was mapped.
  bool reached() const noexcept { return reached_.load(std::memory_order_acquire); }
  uint64_t heard = 0;  // bytes of the pieces that have arrived

  // --- For the control thread. The destructor runs there too.
  void map(PeerMemory& memory);
  void append(PeerMemory& memory, int descriptor, uint64_t piece_bytes);
  void fail(Error error);

 private:
  // Checks the mapped size before the region becomes ready: a copy beyond the mapping would end every kernel of this
  // process.
  void ready_within(cuda::DevicePointer memory, uint64_t memory_bytes);
  void ready(cuda::DevicePointer base) noexcept;

  const bool same_process_;
  const uint64_t their_base_;
  const uint64_t offset_;
  const int device_;
  const cuda::IpcHandle allocation_;

  std::shared_ptr<IpcMapping> mapping_;
  std::optional<cuda::PieceMapping> pieces_;
  cuda::DevicePointer base_ = 0;
  std::optional<Error> error_;
  std::atomic<bool> reached_{false};
  std::atomic<State> state_{State::kComing};
};

// One owner at a time: the connector, then the domain. Nothing here blocks: blocking work goes to `control`. All words
// of the peer are checked, because it may write nonsense.
class PeerRegions {
 public:
  PeerRegions(std::shared_ptr<PeerMemory> memory, bool same_process)
      : memory_(std::move(memory)), same_process_(same_process) {}

  bool same_process() const noexcept { return same_process_; }

  // Returns the region of this key, whose entry on the peer's board is `entry`. Starts its mapping if it is not mapped.
  // Returns null if none of its pieces has arrived, or if the kForget of the region that had its place has not (a peer
  // in this process sends none).
  PeerRegion* find(uint64_t rkey, const RegionEntry& entry, ControlQueue& control);
  // Whether a batch for the region has to wait: its pieces are in flight, or the control thread is mapping them.
  bool awaits(uint64_t rkey) const noexcept {
    const auto found = regions_.find(place_of(rkey));
    return found == regions_.end() || found->second->rkey != rkey ||
           found->second->state() == PeerRegion::State::kComing;
  }
  // Starts to map more regions of the board. Returns true if there were any.
  bool prefetch(const Board& board, ControlQueue& control);
  bool may_prefetch(const Board& board) const noexcept;

  // Handles the peer's kMemory. Returns false if it is malformed.
  bool hear(const same_host::Message& message, UniqueFd descriptor, const Board& board, ControlQueue& control);
  // Handles the peer's kForget. Copies of the launches up to `launch` may use the region. Returns false if it is
  // malformed.
  bool forget(const same_host::Message& message, uint64_t launch);

  // Passes to the control thread the regions that no copy uses any more (`settled(launch)`). Writes for the peer how
  // many pieces and kForgets are done. Returns true if these counts have changed.
  template <typename Settled>
  bool advance(AccountWords& out, ControlQueue& control, Settled&& settled) {
    for (; !forgotten_.empty() && settled(forgotten_.front().launch); forgotten_.pop_front()) {
      let_go(std::move(forgotten_.front().region), control);
    }
    return write_down(out);
  }
  bool must_let_go() const noexcept { return !forgotten_.empty(); }
  // Returns the reason for which nothing of the peer's memory can be mapped, so that the link cannot work. Null:
  // something was mapped, or it is not known yet.
  const Error* useless();

  // Returns all remaining regions, for the control thread to destroy. Call it when the link has ended and none of its
  // copies is in flight.
  std::vector<std::shared_ptr<PeerRegion>> take_all();

 private:
  struct Forgotten {
    uint64_t launch = 0;
    std::shared_ptr<PeerRegion> region;  // null: none of it was mapped
  };
  // The control thread's progress. Shared with its tasks.
  struct Progress {
    std::atomic<uint64_t> pieces{0};  // mapped or dropped
    std::atomic<uint64_t> let_go{0};
  };

  void let_go(std::shared_ptr<PeerRegion> region, ControlQueue& control);
  bool write_down(AccountWords& out);

  std::shared_ptr<PeerMemory> memory_;
  bool same_process_;
  std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  std::unordered_map<uint32_t, std::shared_ptr<PeerRegion>> regions_;  // by place
  // regions of `regions_` that were in state kComing when last looked at
  std::vector<std::shared_ptr<PeerRegion>> coming_;
  std::deque<Forgotten> forgotten_;
  uint32_t prefetched_ = 0;  // places of the board that prefetch() has passed
  uint64_t heard_ = 0;       // number of received pieces
  uint64_t pieces_told_ = 0;
  uint64_t let_go_told_ = 0;
  bool reached_any_ = false;
};

}  // namespace kvc::nvlink
