// RegionTable: the registered memory that a domain's peers may write, by key.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "lane/domain.h"

namespace kvc {

// One owner thread. Owns nothing: a registration outlives its place here.
class RegionTable {
 public:
  void add(Registration& region) { regions_.emplace(region.key, &region); }

  // Null for a key that is unknown or revoked. Who lands there for longer than a call counts in Registration::landing.
  Registration* find(uint64_t key) const noexcept {
    const auto found = regions_.find(key);
    return found == regions_.end() || found->second->revoked ? nullptr : found->second;
  }

  // Revokes the key. True, and the region forgotten, once nothing is landing in it any more: until then call again.
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
