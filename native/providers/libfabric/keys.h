// Keys: which memory of the peer's a link may write, and which of ours its peer has been told of.
//
// The engine's rkeys are random numbers of ours. Before the first write to a region a link asks its peer for it (Ask,
// Tell), and the answer names address and key as the peer's provider has them: so short keys, raw keys, keys of one
// endpoint and offsets instead of addresses are all the same to the engine. It also means that a wrong key is found out
// before anything is written, and that a peer whose memory is withdrawn says when nothing is under way any more (Revoke,
// Revoked): providers that check a key when a write begins go on landing it after the key was withdrawn.
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

// The driving thread; nothing blocks. An error of what the peer said breaks the link.
class Keys {
 public:
  Keys(const Device& device, const RegionTable& regions, Memories& memories, Messages& messages)
      : device_(device), regions_(regions), memories_(memories), messages_(messages) {}

  // --- The peer's regions.

  struct Target {
    enum class State : uint8_t { kAsked, kKnown, kRevoked };
    State state = State::kAsked;
    uint32_t serial = 0;  // of the question
    uint32_t writes = 0;  // under way: whoever begins one raises it
    PeerMemory memory;    // kKnown
  };
  // Asks the peer at the first time. Stays where it is until it is revoked and nothing is under way.
  Target& target(uint64_t rkey);
  // One of its writes has ended.
  void written(uint64_t rkey, Target& target);
  // Tell and Revoke. A key that is void from now on, if any: what waits for it fails.
  Result<std::optional<uint64_t>> learn(std::span<const std::byte> tell);
  Result<std::optional<uint64_t>> lose(std::span<const std::byte> rkey);

  // --- Ours.

  // Ask. The answer may have to wait for the memory.
  Status answer(std::span<const std::byte> ask);
  // Answers what has waited. True if anything happened.
  Result<bool> push();
  bool waits() const noexcept { return !waiting_.empty(); }
  // The region is withdrawn: the peer is told, if it has been told of the region.
  void revoke(const Region& region);
  // Revoked: the peer has let go of a region.
  Status let_go(std::span<const std::byte> rkey);
  // The link has ended: the peer writes nowhere any more.
  void clear();

 private:
  // False: later.
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
