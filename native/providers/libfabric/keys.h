// Keys: the peer's memory that a link may write, and our memory whose keys its peer has received.
//
// The transfer engine's rkeys are our own random numbers. Before the first write to a region, a link requests it from
// its peer (Ask, Tell). The answer contains address and key in the form of the peer's provider. So short keys, raw
// keys, keys of one endpoint and offsets in place of addresses are all the same to the transfer engine. A wrong key is
// found before anything is written. A peer whose memory is withdrawn learns when no write is in flight any more
// (Revoke, Revoked). This is needed because providers that check a key when a write begins go on landing the write
// after the key was withdrawn.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "lane/region_table.h"
#include "providers/libfabric/memories.h"
#include "providers/libfabric/messages.h"

namespace kvc::libfabric {

// Used on the driving thread only; nothing blocks. An error in the peer's messages breaks the link.
class Keys {
 public:
  Keys(const Device& device, const RegionTable& regions, Memories& memories, Messages& messages)
      : device_(device), regions_(regions), memories_(memories), messages_(messages) {}

  // --- The peer's regions.

  struct Target {
    enum class State : uint8_t { kAsked, kKnown, kRevoked };
    State state = State::kAsked;
    uint32_t serial = 0;  // number of the request
    uint32_t writes = 0;  // writes in flight; the caller raises it when it begins one
    PeerMemory memory;    // valid in state kKnown
  };
  // Returns the target of a key, and requests it from the peer at the first time. The reference is valid until the key
  // is revoked and no write is in flight.
  Target& target(uint64_t rkey);
  // Records the end of one of its writes.
  void written(uint64_t rkey, Target& target);
  // Handle Tell and Revoke. They return a key that is void from now on, if any: batches that wait for it fail.
  Result<std::optional<uint64_t>> learn(std::span<const std::byte> tell);
  Result<std::optional<uint64_t>> lose(std::span<const std::byte> rkey);

  // --- Our regions.

  // Handles Ask. The answer may have to wait for the memory.
  Status answer(std::span<const std::byte> ask);
  // Answers requests that have waited. Returns true if anything happened.
  Result<bool> push();
  bool waits() const noexcept { return !waiting_.empty(); }
  // Withdraws the region, and notifies the peer if it has the region's key.
  void revoke(const Region& region);
  // Handles Revoked: the peer does not write to the region any more.
  Status let_go(std::span<const std::byte> rkey);
  // Called when the link has ended: the peer writes nowhere any more.
  void clear();

 private:
  // Returns false if the answer has to wait.
  Result<bool> tell(const Ask& ask);
  void release(uint64_t rkey);

  const Device& device_;
  const RegionTable& regions_;
  Memories& memories_;
  Messages& messages_;
  std::unordered_map<uint64_t, Target> targets_;
  uint32_t next_serial_ = 1;
  std::unordered_map<uint64_t, Region*> told_;
  std::vector<Ask> waiting_;
};

}  // namespace kvc::libfabric
