// IdSource: numbers of one kind of thing, each given once.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvc {

// Any thread. Each kind of thing has its own, so that what there is much of (transfers) does not use up the numbers of what
// there is little of: 32 bits last for 136 years of one peer or region a second.
template <typename Id>
class IdSource {
 public:
  Id next() noexcept { return last_.fetch_add(1, std::memory_order_relaxed) + 1; }

 private:
  std::atomic<Id> last_{0};
};

}  // namespace kvc
