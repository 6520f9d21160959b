// fits(): whether a range lies within another one. Its offsets and lengths may come from a peer or a caller, so their
// sums may overflow.
#pragma once

#include <cstdint>

namespace kvc {

// True if [offset, offset + bytes) lies within [0, size).
constexpr bool fits(uint64_t offset, uint64_t bytes, uint64_t size) noexcept {
  return bytes <= size && offset <= size - bytes;
}

}  // namespace kvc
