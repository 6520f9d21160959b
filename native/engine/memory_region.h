// Memory regions of the transfer engine: local regions that it registered, and remote regions that it imported.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/transfer_engine.h"
#include "lane/domain.h"

namespace kvc {

// Memory of this process as the domains registered it, in one piece. It may contain several regions. The caller owns
// the memory itself.
struct LocalMemory {
  explicit LocalMemory(const MemoryRange& of) : range(of) {}

  const MemoryRange range;
  std::vector<std::unique_ptr<Registration>> registrations;  // by domain; null if its lane does not take this memory
  std::vector<std::optional<uint64_t>> keys;                 // of the registrations, also after their end
  std::vector<std::string> refusals;                         // of lanes that do not take the memory, one line each
  std::vector<uint32_t> regions;                             // regions in this memory
  // False once deregistration has begun: writes from this memory that were not posted yet fail.
  std::atomic<bool> live{true};

  // Used on the transfer thread:
  alignas(64) uint32_t batches_in_flight = 0;  // posted batches that read from this memory
  std::vector<bool> withdrawn;                 // by domain
};

// Both region types have cache lines of their own, apart from the reference count that std::make_shared puts before
// them. The transfer thread changes that count while submitting threads read the regions.

struct alignas(64) LocalRegion : std::enable_shared_from_this<LocalRegion> {
  LocalRegion(RegionId region_id, std::byte* address, uint64_t size, std::shared_ptr<LocalMemory> lies_in)
      : id(region_id), base(address), bytes(size), memory(std::move(lies_in)) {}

  const RegionId id;
  std::byte* const base;
  const uint64_t bytes;
  const std::shared_ptr<LocalMemory> memory;
};

// A region of a peer, as its descriptor describes it.
struct alignas(64) RemoteRegion : std::enable_shared_from_this<RemoteRegion> {
  RemoteRegion(RemoteRegionId region_id, PeerId of_peer, uint64_t memory_base, uint64_t offset_there, uint64_t size,
               std::vector<uint64_t> keys)
      : id(region_id), peer(of_peer), base(memory_base), offset(offset_there), bytes(size), rkeys(std::move(keys)) {}

  const RemoteRegionId id;
  const PeerId peer;
  const uint64_t base;                // of the registered memory that contains the region, in the peer's address space
  const uint64_t offset;              // of the region in that memory
  const uint64_t bytes;               // of the region
  const std::vector<uint64_t> rkeys;  // one per domain of the peer's lane, in the peer's order
  // Used on the transfer thread: the peer has refused the key, so nothing more is written to the region. A refusal may
  // break a link (it breaks a queue pair), and each further refusal would break the next link.
  mutable bool refused = false;
};

}  // namespace kvc
