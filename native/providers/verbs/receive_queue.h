// ReceiveQueue: a shared receive queue that is kept filled.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "providers/verbs/device.h"
#include "providers/verbs/handle.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs {

// Created and destroyed on the control thread. The domain uses it in between.
class ReceiveQueue {
 public:
  // Creates `slots` receives of `slot_bytes` each (0: for immediates alone). Used ones are posted again in groups of
  // `batch`.
  static Result<std::unique_ptr<ReceiveQueue>> create(const Device& device, WorkRequestId::Kind kind, uint32_t slots,
                                                      uint32_t slot_bytes, uint32_t batch);

  abi::ibv_srq* srq() const noexcept { return srq_.get(); }
  uint32_t slots() const noexcept { return static_cast<uint32_t>(requests_.size()); }
  // Returns the first `bytes` that arrived in a slot.
  std::span<const std::byte> bytes(uint32_t slot, uint32_t bytes) const noexcept;

  // Returns a slot whose receive is used up. Its bytes may be overwritten from now on.
  void give_back(uint32_t slot) { returned_.push_back(slot); }
  // Posts the returned slots, if they make a batch.
  void refill() {
    if (returned_.size() >= batch_) post();
  }

 private:
  ReceiveQueue(const Device& device, uint32_t slot_bytes, uint32_t batch);
  void post();

  const Device& device_;
  const uint32_t slot_bytes_;
  const uint32_t batch_;
  std::unique_ptr<std::byte[]> memory_;
  Owned<abi::ibv_mr> mr_{nullptr, nullptr};
  Owned<abi::ibv_srq> srq_{nullptr, nullptr};
  std::vector<abi::ibv_sge> pieces_;
  std::vector<abi::ibv_recv_wr> requests_;  // one per slot, ready to be chained
  std::vector<uint32_t> returned_;
};

}  // namespace kvc::verbs
