// RegionTable: the registered memory that the peers of a domain may write to, by key.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "lane/domain.h"

namespace kvc {

// One owner thread. Owns nothing: a registration outlives its entry here.
class RegionTable {
 public:
  void add(Registration& region) { regions_.emplace(region.key, &region); }

  // Null if the key is unknown or revoked. Writes that land for longer than one call are counted in
  // Registration::landing.
  Registration* find(uint64_t key) const noexcept {
    const auto found = regions_.find(key);
    return found == regions_.end() || found->second->revoked ? nullptr : found->second;
  }

  // Revokes the key. Returns true and forgets the region once no write is landing in it. Until then call again.
  bool withdraw(Registration& region) noexcept {
    region.revoked = true;
    if (region.landing > 0) return false;
    regions_.erase(region.key);
    return true;
  }

  size_t size() const noexcept { return regions_.size(); }

 private:
  std::unordered_map<uint64_t, Registration*> regions_;
};

}  // namespace kvc
