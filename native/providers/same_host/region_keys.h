// RegionKeys: the keys of a domain's regions. Each names a place on its board: a sender finds it without a search.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/random.h"
#include "lane/domain.h"
#include "providers/same_host/lane.h"

namespace kvc::same_host {

// Any thread; nothing here blocks. One thread at a time takes keys: check() holds until its take().
class RegionKeys {
 public:
  // `places`, a power of two, is how many regions the board has room for.
  RegionKeys(const Lane& lane, uint32_t places) : lane_(lane), places_(places) {}
  RegionKeys(const RegionKeys&) = delete;
  RegionKeys& operator=(const RegionKeys&) = delete;

  // Whether there is a place for one more.
  Status check() const {
    const std::lock_guard lock(mutex_);
    if (free_.empty() && used_ == places_) {
      return lane_.error(ErrorCode::kResources, "register_memory",
                         "all " + std::to_string(places_) + " regions are taken: register larger ones");
    }
    return {};
  }
  // A new key, after check(): random above the bits of its place, and never 0.
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
  // Its place may go to another region.
  void give_back(uint64_t key) {
    const std::lock_guard lock(mutex_);
    free_.push_back(place(key));
  }

  uint32_t place(uint64_t key) const noexcept { return static_cast<uint32_t>(key % places_); }

 private:
  const Lane& lane_;
  const uint32_t places_;
  mutable std::mutex mutex_;
  uint32_t used_ = 0;           // the places from here on were never taken: the board has no memory for them yet
  std::vector<uint32_t> free_;  // below it
};

// A registration with a place on the board, until its end.
class BoardRegion : public Registration {
 public:
  // After keys.check(). `keys` outlives this.
  BoardRegion(const MemoryRange& range, RegionKeys& keys) : Registration(range, keys.take()), keys_(keys) {}
  ~BoardRegion() override { keys_.give_back(key); }

 private:
  RegionKeys& keys_;
};

}  // namespace kvc::same_host
