// RegionTable: the memory that peers may write and that writes are read from.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/error.h"
#include "providers/verbs/device.h"
#include "providers/verbs/handle.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs {

struct Region {
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  Owned<abi::ibv_mr> mr{nullptr, nullptr};
  bool host = true;        // GPU memory cannot be copied into a work request
  uint32_t in_flight = 0;  // posted batches that read from here
};

class RegionTable {
 public:
  // Pins and registers [base, base+bytes), of the host or of a GPU. The key's low half is the NIC's rkey, 32 bits that
  // only the peers of our queue pairs can use. Its high half is this domain's: the peer's end of a link compares it, so
  // that a key of another domain, or one that was garbled, is refused before the NIC breaks the queue pair over it.
  Result<uint64_t> add(const Device& device, std::byte* base, uint64_t bytes);
  // False: batches that read from it are still posted; its key then stays valid. True: gone.
  bool remove(uint64_t key);
  // The region that holds all of [begin, end); null: none does.
  Region* find(const std::byte* begin, const std::byte* end) noexcept;
  size_t size() const noexcept { return regions_.size(); }
  uint32_t key_half() const noexcept { return key_half_; }

 private:
  const uint32_t key_half_ = random_bits();
  std::unordered_map<uint64_t, std::unique_ptr<Region>> regions_;
  Region* last_ = nullptr;  // found last: the engine writes many batches from one region
};

// Registers memory: GPU memory as a DMA-BUF, or else as the peer memory module (nvidia_peermem) lets it.
Result<Owned<abi::ibv_mr>> register_memory(const Device& device, std::byte* base, uint64_t bytes, bool& host);

}  // namespace kvc::verbs
