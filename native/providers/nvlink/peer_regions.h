// PeerRegions: the regions of one peer, as far as they are mapped here.
//
// Mapping and unmapping block, so they are the control thread's; a PeerRegion is what its tasks and the domain share. A
// region that a handle names is mapped when the link is made, or when it is first looked for; one in pieces as these come.
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

  // `entry` is the peer's, of the key `key`. What it says is copied: the peer may go on writing.
  PeerRegion(uint64_t key, const RegionEntry& entry, bool same_process);

  const uint64_t rkey;
  const uint64_t bytes;
  const uint64_t pieces_bytes;  // 0: it is not in pieces, or they are ours

  // --- The domain. What has changed before state() says so is to be seen afterwards.
  State state() const noexcept { return state_.load(std::memory_order_acquire); }
  // kReady: its first address here.
  cuda::DevicePointer base() const noexcept { return base_; }
  // kFailed: no batch can be written there.
  const Error& error() const noexcept { return *error_; }
  // Some of it was mapped.
  bool reached() const noexcept { return reached_.load(std::memory_order_acquire); }
  uint64_t heard = 0;  // bytes of pieces that have come

  // --- The control thread, as its end.
  void map(PeerMemory& memory);
  void append(PeerMemory& memory, int descriptor, uint64_t piece_bytes);
  void fail(Error error);

 private:
  // A copy beyond what is mapped would end every kernel of this process.
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

// One owner at a time: the connector, then the domain. Nothing here blocks: that is left to `control`. Whatever the peer
// says is checked: it may be out of its senses.
class PeerRegions {
 public:
  PeerRegions(std::shared_ptr<PeerMemory> memory, bool same_process)
      : memory_(std::move(memory)), same_process_(same_process) {}

  bool same_process() const noexcept { return same_process_; }

  // The region of this key, whose entry on the peer's board is `entry`; has it mapped if nobody has. Null: nothing of its
  // pieces has come, or the kForget of the region that had its place (another process's: one's own sends none).
  PeerRegion* find(uint64_t rkey, const RegionEntry& entry, ControlQueue& control);
  // Whether a batch for it has to wait: its pieces, or the control thread, are still on the way.
  bool awaits(uint64_t rkey) const noexcept {
    const auto found = regions_.find(place_of(rkey));
    return found == regions_.end() || found->second->rkey != rkey ||
           found->second->state() == PeerRegion::State::kComing;
  }
  // Has more regions mapped that are on the board; true if there were any.
  bool prefetch(const Board& board, ControlQueue& control);
  bool may_prefetch(const Board& board) const noexcept;

  // The peer's kMemory. False: it makes no sense.
  bool hear(const same_host::Message& message, UniqueFd descriptor, const Board& board, ControlQueue& control);
  // The peer's kForget. `launch`: copies up to this one may use the region. False: it makes no sense.
  bool forget(const same_host::Message& message, uint64_t launch);

  // Leaves to the control thread what no copy uses any more (`settled(launch)`), and writes down for the peer how far that
  // and the pieces have come; true if it has news.
  template <typename Settled>
  bool advance(AccountWords& out, ControlQueue& control, Settled&& settled) {
    for (; !forgotten_.empty() && settled(forgotten_.front().launch); forgotten_.pop_front()) {
      let_go(std::move(forgotten_.front().region), control);
    }
    return write_down(out);
  }
  bool must_let_go() const noexcept { return !forgotten_.empty(); }
  // Why nothing of the peer's can be mapped, so that the link is of no use; null: that is not so, or not known.
  const Error* useless();

  // The link has ended, and none of its copies is under way: all that is left, for the control thread to end.
  std::vector<std::shared_ptr<PeerRegion>> take_all();

 private:
  struct Forgotten {
    uint64_t launch = 0;
    std::shared_ptr<PeerRegion> region;  // null: nothing of it was mapped
  };
  // How far the control thread has come. Shared with its tasks.
  struct Progress {
    std::atomic<uint64_t> pieces{0};  // mapped, or dropped
    std::atomic<uint64_t> let_go{0};
  };

  void let_go(std::shared_ptr<PeerRegion> region, ControlQueue& control);
  bool write_down(AccountWords& out);

  std::shared_ptr<PeerMemory> memory_;
  bool same_process_;
  std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  std::unordered_map<uint32_t, std::shared_ptr<PeerRegion>> regions_;  // by place
  std::vector<std::shared_ptr<PeerRegion>> coming_;                    // those of them that were, when last looked at
  std::deque<Forgotten> forgotten_;
  uint32_t prefetched_ = 0;  // places of the board
  uint64_t heard_ = 0;       // pieces
  uint64_t pieces_told_ = 0;
  uint64_t let_go_told_ = 0;
  bool reached_any_ = false;
};

}  // namespace kvc::nvlink
