// Lists of pages, as the benchmarks pass them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

namespace kvc::bench {

// Pages of one length: page i lies at base + slots[i] * page_bytes. The caller owns the memory.
struct PageList {
  std::byte* base = nullptr;
  std::span<const int64_t> slots;
  uint64_t page_bytes = 0;

  std::byte* page(size_t i) const noexcept { return base + static_cast<uint64_t>(slots[i]) * page_bytes; }
};

// Throws std::out_of_range unless every page lies within `pool_bytes`: slots may have come over a socket.
inline void check_within(std::span<const int64_t> slots, uint64_t page_bytes, uint64_t pool_bytes) {
  if (page_bytes == 0) throw std::out_of_range("a page needs at least one byte");
  const uint64_t capacity = pool_bytes / page_bytes;
  for (const int64_t slot : slots) {
    if (slot < 0 || static_cast<uint64_t>(slot) >= capacity) throw std::out_of_range("page outside the pool");
  }
}

}  // namespace kvc::bench
