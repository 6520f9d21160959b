#include "base/random.h"

#include <sys/random.h>

#include <algorithm>
#include <random>

namespace kvc {

void fill_random(std::span<std::byte> bytes) noexcept {
  while (!bytes.empty()) {
    // The kernel returns up to 256 bytes whole and uninterrupted (getrandom(2)).
    const size_t part = std::min<size_t>(bytes.size(), 256);
    if (getrandom(bytes.data(), part, 0) != static_cast<ssize_t>(part)) {
      // A sandbox may forbid the call. The library has other ways to the same pool.
      std::random_device device;
      std::generate_n(bytes.begin(), part, [&] { return static_cast<std::byte>(device()); });
    }
    bytes = bytes.subspan(part);
  }
}

uint64_t random_key() noexcept {
  uint64_t key = 0;
  while (key == 0) fill_random(std::as_writable_bytes(std::span(&key, 1)));
  return key;
}

Secret Secret::make() noexcept {
  Secret secret;
  fill_random(secret.bytes);
  return secret;
}

bool Secret::equals(const Secret& other) const noexcept {
  unsigned difference = 0;
  for (size_t i = 0; i < bytes.size(); ++i) difference |= std::to_integer<unsigned>(bytes[i] ^ other.bytes[i]);
  return difference == 0;
}

}  // namespace kvc
