// RegionTable: the memory that connected peers may write, by key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "engine/error.h"
#include "providers/tcp/wire.h"

namespace kvc::tcp {

struct Region {
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  uint32_t landing = 0;  // frames that have begun to land here and have not ended
  bool revoked = false;

  // Overflow-safe: `offset` and `length` are a peer's words.
  bool contains(uint64_t offset, uint64_t length) const noexcept { return length <= bytes && offset <= bytes - length; }
};

// One owner thread. A Region keeps its address until remove() returned true for it.
class RegionTable {
 public:
  // [base, base+bytes) under a new key.
  Result<uint64_t> add(std::byte* base, uint64_t bytes) {
    if (base == nullptr || bytes == 0 || bytes > UINT64_MAX - reinterpret_cast<uintptr_t>(base)) {
      return tcp_error(ErrorCode::kInvalidArgument, "register_region", "the range is empty or wraps around");
    }
    for (;;) {
      Result<uint64_t> key = make_key();
      if (!key || regions_.try_emplace(key.value(), Region{base, bytes}).second) return key;
    }
  }

  // Null for a key that is unknown or revoked.
  Region* find(uint64_t rkey) noexcept {
    const auto found = regions_.find(rkey);
    return found == regions_.end() || found->second.revoked ? nullptr : &found->second;
  }

  // Revokes the key. False while a frame is still landing: call again.
  bool remove(uint64_t rkey) noexcept {
    const auto found = regions_.find(rkey);
    if (found == regions_.end()) return true;
    found->second.revoked = true;
    if (found->second.landing > 0) return false;
    regions_.erase(found);
    return true;
  }

 private:
  std::unordered_map<uint64_t, Region> regions_;
};

}  // namespace kvc::tcp
