// RegionKeys: the keys of a domain's regions. Each names a place on its board: a sender finds it without a search.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "providers/same_host/lane.h"
#include "providers/same_host/system.h"

namespace kvc::same_host {

// One thread; nothing here blocks.
class RegionKeys {
 public:
  // `places`, a power of two, is how many regions the board has room for.
  RegionKeys(const Lane& lane, uint32_t places) : lane_(lane), places_(places), free_(places) {
    std::iota(free_.rbegin(), free_.rend(), 0U);
  }

  // Whether [base, base+bytes) can be a region at all, and there is a place for one more.
  Status check(const std::byte* base, uint64_t bytes) const {
    if (base == nullptr || bytes == 0 || bytes > UINT64_MAX - reinterpret_cast<uint64_t>(base)) {
      return lane_.error(ErrorCode::kInvalidArgument, "register_region", "the range is empty or wraps around");
    }
    if (free_.empty()) {
      return lane_.error(ErrorCode::kResources, "register_region",
                         "all " + std::to_string(places_) + " regions are taken: register larger ones");
    }
    return {};
  }
  // A new key, after check(): random above the bits of its place, and never 0.
  Result<uint64_t> take() {
    uint64_t rkey = 0;
    if (Status random = fill_random(std::as_writable_bytes(std::span(&rkey, 1))); !random) {
      return lane_.named(random.error());
    }
    const uint32_t place = free_.back();
    free_.pop_back();
    return (rkey | places_) - rkey % places_ + place;
  }
  // Its place may go to another region.
  void give_back(uint64_t rkey) { free_.push_back(place(rkey)); }
  uint32_t place(uint64_t rkey) const noexcept { return static_cast<uint32_t>(rkey % places_); }

 private:
  const Lane& lane_;
  const uint32_t places_;
  std::vector<uint32_t> free_;
};

}  // namespace kvc::same_host
