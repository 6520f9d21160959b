// Random numbers from the kernel: keys that are hard to guess, and secrets that prove an identity.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvc {

// Any thread. Cannot fail. Blocks only until the kernel's pool is ready, which is long before the network starts.
void fill_random(std::span<std::byte> bytes) noexcept;

// 64 random bits, never 0.
uint64_t random_key() noexcept;

// 128 random bits.
struct Secret {
  std::array<std::byte, 16> bytes{};

  static Secret make() noexcept;
  // Compares in a time that does not depend on the position of the first difference.
  bool equals(const Secret& other) const noexcept;
};

}  // namespace kvc
