// FarRanks: the lanes from one rank to the ranks of other nodes, and the packets that travel over them.
//
// Each dispatch, and each combine, is one scatter of a transfer engine: one packet to every far rank, with one
// immediate. The receiver has one place for each source, slot and phase. It sends no credit: a rank sends its next
// dispatch only after it has all packets of its combine, and the next combine only after all of the dispatch. The
// sender has two places, so that no launch waits for the acknowledgement of the packet before.
//
// The receiver's count of a source rises by one for each packet, whatever its size. Two counters take turns. Each has
// one packet in flight at most, so a packet that a broken link has lost is written again over another link.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/shared_memory.h"
#include "base/timeout.h"
#include "cuda/moe_launch.h"
#include "engine/transfer_engine.h"
#include "lane/host_completion_word.h"
#include "moe/far_slot.h"

namespace kvc::moe {

// The same on all ranks, except `rank` and `far`.
struct FarConfig {
  uint32_t rank = 0;
  uint32_t ranks = 2;  // of the group
  uint32_t far = 0;    // one bit for each rank of another node
  uint32_t slots = 1;
  uint32_t max_tokens = 0;
  uint32_t row_bytes = 0;  // most bytes of one token's columns together
  uint32_t hidden = 0;     // most elements of a result
};

// Forming: of two ranks, the lower one calls offer(), the higher one accept(), the lower one complete(), the higher one
// meet(). Each call takes what the other rank's last call has returned. Then both call begin(). These calls block and
// come from one thread. Any thread may call the others.
class FarRanks {
 public:
  // Opens the transfer engine and allocates the memory of all packets.
  static Result<std::unique_ptr<FarRanks>> create(EngineConfig engine, const FarConfig& config);
  FarRanks(const FarRanks&) = delete;
  FarRanks& operator=(const FarRanks&) = delete;
  // Closes the transfer engine, which ends every write into the memory of packets. Blocks. No launch and no other call may
  // run.
  ~FarRanks();

  Result<Bytes> offer(uint32_t rank);
  Result<Bytes> accept(uint32_t rank, std::span<const std::byte> offer);
  Result<Bytes> complete(uint32_t rank, std::span<const std::byte> accepted);
  Status meet(uint32_t rank, std::span<const std::byte> completed);
  Status begin();

  const FarConfig& config() const noexcept { return config_; }
  // For Group: the slot's packets. Valid until the destructor.
  FarSlot& slot(uint32_t number) noexcept;
  // Whether such a launch may follow the slot's launches before it, and its packets fit. If all ranks make the same
  // calls, they get the same answer.
  Status check(uint32_t slot, const DispatchLaunch& launch) const;
  Status check(uint32_t slot, const CombineLaunch& launch, std::span<const uint32_t> sizes) const;

  // A far rank that has left or cannot be reached any more, since the last call. The caller passes it on to
  // Group::lose(), which ends steps.
  struct Departure {
    uint32_t rank = 0;
    bool left = false;  // it called leave()
    std::string reason;
  };
  std::vector<Departure> departures();
  // Readable while departures() would return one.
  int departure_fd() const { return engine_->event_fd(); }
  // Short messages between the ranks, apart from steps. send() does not wait for the rank.
  Status send(uint32_t rank, std::span<const std::byte> message);
  std::vector<std::pair<uint32_t, Bytes>> receive();
  int message_fd() const { return engine_->message_fd(); }
  // Why packets to or from this rank ended steps, as words that follow the rank's name; empty: they did not. For the own
  // rank: why it cannot send.
  std::string failure(uint32_t rank) const;

  struct Counts {
    uint64_t scatters = 0;    // submitted here
    uint64_t immediates = 0;  // received
    uint64_t rewritten = 0;   // packets, or parts of packets, written again after a link broke
    uint64_t links = 0;       // up now
    uint64_t links_lost = 0;
  };
  Counts counts() const;

  // Leaves every far rank in good order: it gets a Departure with `left`. Ranks that do not respond within `timeout` see
  // an end instead, and delay no other rank's goodbye. No launch may follow.
  void leave(Timeout timeout);

 private:
  class Slot;
  // Another rank, with what this rank needs to write to it and to see its packets.
  struct Far {
    uint32_t rank = 0;
    PeerId peer = 0;
    CounterSet counters;                                     // by turn
    std::vector<std::shared_ptr<HostCompletionWord>> words;  // of the counters
    std::vector<uint64_t> targets;                           // by slot and phase: offset of this rank's place there
    std::vector<uint32_t> immediates;                        // by turn: its counters
    RemoteRegionId region = 0;
  };

  FarRanks(const FarConfig& config, std::unique_ptr<TransferEngine> engine, SharedMemory memory, RegionId region);
  // The memory of a packet: received (turn 2), or sent at one of two turns.
  uint64_t place(uint32_t slot, uint32_t phase, uint32_t turn, size_t index) const noexcept;
  unsigned char* at(uint64_t place) const noexcept { return reinterpret_cast<unsigned char*>(memory_.data()) + place; }
  static uint64_t memory_bytes(const FarConfig& config) noexcept;
  Result<Far*> find(uint32_t rank, std::string_view operation);
  Result<Bytes> introduce(Far& far);
  Status read_introduction(Far& far, std::span<const std::byte> bytes);
  void lose(uint32_t rank, const std::string& reason);

  const FarConfig config_;
  const std::array<uint64_t, 2> packet_bytes_;  // by phase: the most
  const SharedMemory memory_;                   // outlives the transfer engine
  std::unique_ptr<TransferEngine> engine_;
  const RegionId region_;
  std::vector<Far> far_;  // in rank order
  std::vector<std::unique_ptr<Slot>> slots_;
  std::atomic<uint32_t> lost_{0};  // the bit of the first rank with a failure()
  std::atomic<uint64_t> scatters_{0};
  mutable std::mutex mutex_;
  std::array<std::string, kMaxRanks> failures_;  // guarded by mutex_
};

}  // namespace kvc::moe
