// BounceConnector: the control half of the bounce lane, which works over a lower lane (domain.h). It adopts the GPU and
// makes the slots.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/copy_queue.h"
#include "lane/domain.h"
#include "providers/bounce/slot_memory.h"
#include "providers/bounce/wire.h"

namespace kvc::bounce {

// Slots in which batches are gathered, for all links together: enough for two links at full speed.
inline constexpr uint32_t kPoolSlots = 2 * kSlots;

// Memory that the transfer engine's user has registered. It is not registered with the lower lane.
class Region final : public Registration {
 public:
  Region(const MemoryRange& range, std::shared_ptr<cuda::Copier> copier);

  const std::shared_ptr<cuda::Copier> copier;  // null: host memory
  bool in_gpu() const noexcept { return copier != nullptr; }
};

// This end of a link, as the connector passes it to the domain.
struct LinkSlots final : LinkEnd {
  std::shared_ptr<SlotMemory> memory;  // our slots, which the peer fills
  uint64_t peer_rkey = 0;              // key of the peer's slots, which this side fills
  uint64_t peer_base = 0;
  std::unique_ptr<LinkEnd> below;
};

class BounceConnector final : public Connector {
 public:
  // `below` is the connector of the lower lane, which moves host memory.
  static Result<std::unique_ptr<BounceConnector>> open(const DomainConfig& config, std::unique_ptr<Connector> below);
  ~BounceConnector() override;

  // The slots in which the domain gathers. Valid as long as this object.
  const SlotMemory& pool() const noexcept { return *pool_; }

  std::string description() const override;
  uint64_t bits_per_second() const override { return below_->bits_per_second(); }
  DomainLimits limits() const override { return {.batch_bytes = kSlotBytes, .window_bytes = kSlots * kSlotBytes}; }
  Result<std::unique_ptr<Registration>> register_memory(const MemoryRange& range) override;
  Result<Bytes> offer(LinkId link) override;
  Result<Accepted> accept(LinkId link, std::span<const std::byte> offer) override;
  Result<std::unique_ptr<LinkEnd>> complete(LinkId link, std::span<const std::byte> answer) override;
  void withdraw(LinkId link) override;
  int fd() const override { return below_->fd(); }
  void serve() override { below_->serve(); }

 private:
  BounceConnector(const DomainConfig& config, std::unique_ptr<Connector> below)
      : below_(std::move(below)), gpu_(config.copy_blocks) {}

  Result<std::shared_ptr<cuda::Copier>> adopt(int device);
  Result<std::unique_ptr<LinkSlots>> make_slots();

  const std::unique_ptr<Connector> below_;
  std::shared_ptr<SlotMemory> pool_;
  std::mutex gpu_mutex_;  // guards gpu_ and slots_; while it is held, only the opening of the GPU may block
  std::vector<std::weak_ptr<SlotMemory>> slots_;  // slots of links and offers, which the GPU has to pin
  std::unordered_map<LinkId, std::unique_ptr<LinkSlots>> offers_;
  cuda::DomainGpu gpu_;  // its destructor waits for copies from and into the slots
};

}  // namespace kvc::bounce
