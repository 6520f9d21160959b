// fits(): whether a piece lies within something. Offsets and lengths are a peer's words, or a caller's: their sums may
// overflow.
#pragma once

#include <cstdint>

namespace kvc {

// [offset, offset + bytes) within [0, size).
constexpr bool fits(uint64_t offset, uint64_t bytes, uint64_t size) noexcept {
  return bytes <= size && offset <= size - bytes;
}

}  // namespace kvc
