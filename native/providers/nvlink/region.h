// Region: memory of one of this process's GPUs that peers may write over the nvlink lane.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "cuda/copier.h"
#include "cuda/virtual_memory.h"
#include "lane/domain.h"
#include "providers/nvlink/wire.h"
#include "providers/same_host/region_keys.h"

namespace kvc::nvlink {

using Pieces = std::shared_ptr<const std::vector<cuda::MemoryChunk>>;  // at least one

// How other processes map a region: by a handle, or in pieces.
struct Shared {
  cuda::IpcHandle handle{};
  uint64_t offset = 0;  // offset of the region in the shared memory
  Pieces pieces{};
  uint64_t pieces_bytes = 0;
};

class Region final : public same_host::BoardRegion {
 public:
  // The regions that are in pieces. The memory thread changes it, and the control thread reads it.
  class Registry {
   public:
    void insert(const Region* region) {
      const std::lock_guard lock(mutex_);
      regions_.insert(region);
    }
    void erase(const Region* region) {
      const std::lock_guard lock(mutex_);
      regions_.erase(region);
    }
    // Returns the key and pieces of a region for which `wanted(key)` returns true; without pieces if no region matches.
    template <typename Wanted>
    std::pair<uint64_t, Pieces> find(Wanted&& wanted) const {
      const std::lock_guard lock(mutex_);
      for (const Region* region : regions_) {
        if (wanted(region->key)) return {region->key, region->shared.pieces};
      }
      return {};
    }

   private:
    mutable std::mutex mutex_;
    std::set<const Region*> regions_;
  };
  // `registry` contains this region, if it is in pieces, until the destructor. `keys` and `registry` outlive it.
  Region(const MemoryRange& range, same_host::RegionKeys& keys, Registry& registry, Shared how,
         std::shared_ptr<cuda::Copier> gpu)
      : BoardRegion(range, keys), shared(std::move(how)), copier(std::move(gpu)), registry_(registry) {
    if (shared.pieces) registry_.insert(this);
  }
  ~Region() override { registry_.erase(this); }

  uint32_t place() const noexcept { return place_of(key); }

  const Shared shared;
  const std::shared_ptr<cuda::Copier> copier;

  // Used by the domain: a link that existed when the region was revoked, as long as its peer may use the region.
  struct User {
    LinkId link = 0;
    uint64_t entered = 0;  // batches that had entered by then
    uint64_t forgets = 0;  // the AccountWords::let_go to wait for
  };
  std::vector<User> users;

 private:
  Registry& registry_;
};

}  // namespace kvc::nvlink
