// RegionKeys: the keys of a domain's regions. Each key contains a place on the domain's board, so that a sender finds
// the region without a search.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/random.h"
#include "lane/domain.h"
#include "providers/same_host/lane.h"

namespace kvc::same_host {

// Any thread may use it; nothing here blocks. Only one thread at a time takes keys: the result of check() holds until
// that thread's take().
class RegionKeys {
 public:
  // `places`, a power of two, is the number of regions for which the board has room.
  RegionKeys(const Lane& lane, uint32_t places) : lane_(lane), places_(places) {}
  RegionKeys(const RegionKeys&) = delete;
  RegionKeys& operator=(const RegionKeys&) = delete;

  // Whether a place is free.
  Status check() const {
    const std::lock_guard lock(mutex_);
    if (free_.empty() && used_ == places_) {
      return lane_.error(ErrorCode::kResources, "register_memory",
                         "all " + std::to_string(places_) + " regions are taken: register larger ones");
    }
    return {};
  }
  // Returns a new key: random above the bits of its place, and never 0. Call it after check().
  uint64_t take() {
    const std::lock_guard lock(mutex_);
    uint32_t place = used_;
    if (free_.empty()) {
      ++used_;
    } else {
      place = free_.back();
      free_.pop_back();
    }
    return ((random_key() | places_) & ~uint64_t{places_ - 1}) + place;
  }
  // Frees the key's place for another region.
  void give_back(uint64_t key) {
    const std::lock_guard lock(mutex_);
    free_.push_back(place(key));
  }

  uint32_t place(uint64_t key) const noexcept { return static_cast<uint32_t>(key % places_); }

 private:
  const Lane& lane_;
  const uint32_t places_;
  mutable std::mutex mutex_;
  uint32_t used_ = 0;           // number of places ever taken; the board has no memory for the places behind them yet
  std::vector<uint32_t> free_;  // free places below `used_`
};

// A registration with a place on the board. The destructor frees the place.
class BoardRegion : public Registration {
 public:
  // Call it after keys.check(). `keys` outlives this.
  BoardRegion(const MemoryRange& range, RegionKeys& keys) : Registration(range, keys.take()), keys_(keys) {}
  ~BoardRegion() override { keys_.give_back(key); }

 private:
  RegionKeys& keys_;
};

}  // namespace kvc::same_host
