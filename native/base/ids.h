// IdSource: gives out numbers for one kind of object, each number once.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvc {

// Any thread. Each kind of object has its own source, so that frequent objects (transfers) do not use up the numbers of
// rare ones. With one peer or region a second, 32 bits last for 136 years.
template <typename Id>
class IdSource {
 public:
  Id next() noexcept { return last_.fetch_add(1, std::memory_order_relaxed) + 1; }

 private:
  std::atomic<Id> last_{0};
};

}  // namespace kvc
