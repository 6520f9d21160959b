// RegionTable: the memory that was registered with a domain, by the keys that the engine knows it by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>

#include "engine/domain.h"
#include "providers/libfabric/device.h"

namespace kvc::libfabric {

struct Region {
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  Fid<fid_mr> memory;  // none where the device wants one for each endpoint: then the links have them
  uint32_t reads = 0;  // of our own writes, under way
  bool revoked = false;
  std::set<LinkId> told{};  // links whose peers know how to write here

  bool contains(const std::byte* begin, uint64_t length) const noexcept {
    return begin >= base && length <= bytes && static_cast<uint64_t>(begin - base) <= bytes - length;
  }
};

// One owner thread. A Region keeps its address until it is erased.
class RegionTable {
 public:
  void add(uint64_t rkey, Region region) {
    by_base_.emplace(region.base, rkey);
    regions_.emplace(rkey, std::move(region));
  }
  // Revoked ones too.
  Region* find(uint64_t rkey) noexcept {
    const auto found = regions_.find(rkey);
    return found == regions_.end() ? nullptr : &found->second;
  }
  // A region that holds these bytes; null if none does.
  Region* holding(const std::byte* begin, uint64_t length) noexcept {
    // The nearest that begins at or before them; where regions overlap, perhaps one of those before it.
    for (auto next = by_base_.upper_bound(begin); next != by_base_.begin();) {
      --next;
      Region& region = regions_.find(next->second)->second;
      if (!region.revoked && region.contains(begin, length)) return &region;
    }
    return nullptr;
  }
  // A link has ended: its peer knows no key any more.
  void forget(LinkId link) noexcept {
    for (auto& [rkey, region] : regions_) region.told.erase(link);
  }
  void erase(uint64_t rkey) noexcept {
    const auto found = regions_.find(rkey);
    if (found == regions_.end()) return;
    for (auto [entry, end] = by_base_.equal_range(found->second.base); entry != end; ++entry) {
      if (entry->second == rkey) {
        by_base_.erase(entry);
        break;
      }
    }
    regions_.erase(found);
  }

 private:
  std::unordered_map<uint64_t, Region> regions_;
  std::multimap<const std::byte*, uint64_t> by_base_;
};

}  // namespace kvc::libfabric
