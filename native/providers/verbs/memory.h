// Memory registered with a NIC. Used on the memory thread, because pinning takes 30 ms a GiB and more.
#pragma once

#include <cstdint>
#include <memory>

#include "lane/domain.h"
#include "providers/verbs/device.h"
#include "providers/verbs/handle.h"

namespace kvc::verbs {

class MemoryRegistration final : public Registration {
 public:
  // Registers memory of the host or of a GPU. The key's low half is the NIC's rkey, 32 bits that only the peers of our
  // queue pairs can use. Its high half is the domain's number. The peer's end of a link compares it, so that a garbled
  // key, or a key of another domain, is refused before the NIC breaks the queue pair over it.
  static Result<std::unique_ptr<Registration>> create(const Device& device, uint32_t key_half,
                                                      const MemoryRange& range);
  MemoryRegistration(const MemoryRange& range, uint32_t key_half, Owned<abi::ibv_mr> mr, bool of_host)
      : Registration(range, uint64_t{key_half} << 32 | mr->rkey), host(of_host), mr_(std::move(mr)) {}
  // Blocks until no write of a peer is landing any more. From then on the NIC refuses the key.
  ~MemoryRegistration() override = default;

  uint32_t lkey() const noexcept { return mr_->lkey; }
  const bool host;  // false: GPU memory, which cannot be copied into a work request

 private:
  Owned<abi::ibv_mr> mr_;
};

// Registers host memory that peers cannot name: a provider's own buffers.
Result<Owned<abi::ibv_mr>> register_host_memory(const Device& device, std::byte* base, uint64_t bytes);

}  // namespace kvc::verbs
