// Memory regions as the engine knows them: the local ones that it registered, and the peers' that were imported.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/transfer_engine.h"

namespace kvc {

// Both on cache lines of their own, apart from the reference count that std::make_shared puts before them: the worker
// changes that, and who submits a write reads them; the worker's own fields are on another line.

// Memory of this process that every domain of the engine knows. The memory itself is the caller's.
struct alignas(64) LocalRegion : std::enable_shared_from_this<LocalRegion> {
  RegionId id = 0;
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  std::vector<uint64_t> rkeys;  // one per domain, in the group's order
  // False from the moment deregistration began: writes from it that were not posted yet fail.
  std::atomic<bool> live{true};

  // The worker's:
  alignas(64) uint32_t batches_in_flight = 0;  // posted batches that read from here
  std::vector<bool> revoked;                   // per domain: deregister_region() said true
};

// A peer's region, as its descriptor told it. Immutable.
struct alignas(64) RemoteRegion : std::enable_shared_from_this<RemoteRegion> {
  RemoteRegion(RemoteRegionId region_id, PeerId of_peer, uint64_t base_address, uint64_t size,
               std::vector<uint64_t> keys)
      : id(region_id), peer(of_peer), base(base_address), bytes(size), rkeys(std::move(keys)) {}

  const RemoteRegionId id;
  const PeerId peer;
  const uint64_t base;  // in the peer's address space
  const uint64_t bytes;
  const std::vector<uint64_t> rkeys;  // one per domain of the peer's lane, in the peer's order
};

}  // namespace kvc
