// Memory regions as the engine knows them: the local ones that it registered, and the peers' that were imported.
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

// Memory of this process as the domains registered it, in one piece. Several regions may lie in it. The memory itself is
// the caller's.
struct LocalMemory {
  explicit LocalMemory(const MemoryRange& of) : range(of) {}

  const MemoryRange range;
  std::vector<std::unique_ptr<Registration>> registrations;  // by domain; null where its lane does not take this memory
  std::vector<std::optional<uint64_t>> keys;                 // theirs; as they were once they have ended
  std::vector<std::string> refusals;                         // of those lanes, a line each
  std::vector<uint32_t> regions;                             // that lie in it
  // False from the moment deregistration began: writes from it that were not posted yet fail.
  std::atomic<bool> live{true};

  // The worker's:
  alignas(64) uint32_t batches_in_flight = 0;  // posted batches that read from here
  std::vector<bool> withdrawn;                 // by domain
};

// Both on cache lines of their own, apart from the reference count that std::make_shared puts before them: the worker
// changes that, and who submits a write reads them.

struct alignas(64) LocalRegion : std::enable_shared_from_this<LocalRegion> {
  LocalRegion(RegionId region_id, std::byte* address, uint64_t size, std::shared_ptr<LocalMemory> lies_in)
      : id(region_id), base(address), bytes(size), memory(std::move(lies_in)) {}

  const RegionId id;
  std::byte* const base;
  const uint64_t bytes;
  const std::shared_ptr<LocalMemory> memory;
};

// A peer's region, as its descriptor told it.
struct alignas(64) RemoteRegion : std::enable_shared_from_this<RemoteRegion> {
  RemoteRegion(RemoteRegionId region_id, PeerId of_peer, uint64_t memory_base, uint64_t offset_there, uint64_t size,
               std::vector<uint64_t> keys)
      : id(region_id), peer(of_peer), base(memory_base), offset(offset_there), bytes(size), rkeys(std::move(keys)) {}

  const RemoteRegionId id;
  const PeerId peer;
  const uint64_t base;                // of the registered memory that it lies in, in the peer's address space
  const uint64_t offset;              // of the region in that memory
  const uint64_t bytes;               // of the region
  const std::vector<uint64_t> rkeys;  // one per domain of the peer's lane, in the peer's order
  // The worker's: the peer has refused its key, so that nothing more is written there. Where a refusal breaks a link, as it
  // does a queue pair, each further one would cost the next link.
  mutable bool refused = false;
};

}  // namespace kvc
