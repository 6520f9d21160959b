// Random numbers of the kernel's: keys that are hard to guess, and secrets that prove who somebody is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvc {

// Any thread. Cannot fail, and blocks only before the kernel's pool is ready, which it is long before there is a network.
void fill_random(std::span<std::byte> bytes) noexcept;

// 64 random bits, never 0.
uint64_t random_key() noexcept;

// 128 random bits.
struct Secret {
  std::array<std::byte, 16> bytes{};

  static Secret make() noexcept;
  // In time that does not depend on where the two differ.
  bool equals(const Secret& other) const noexcept;
};

}  // namespace kvc
