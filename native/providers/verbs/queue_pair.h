// QueuePair: one reliable connected queue pair. It is created, connected and destroyed on the control thread, because
// each of these is a command to the device. The domain's thread posts on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "providers/verbs/device.h"
#include "providers/verbs/domain_resources.h"
#include "providers/verbs/handle.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs {

class QueuePair {
 public:
  // --- For the control thread. All of these calls block.

  // Creates a queue pair in INIT, in which it neither receives nor sends. `access` is what its peer may do to our
  // memory.
  static Result<std::shared_ptr<QueuePair>> create(const DomainResources& resources, const ReceiveQueue& receives,
                                                   uint32_t slots, unsigned access);
  // Moves it from INIT to RTR to RTS. It then receives from the peer, starting at the peer's PSN, and may send,
  // starting at its own PSN. The peer need not be ready as long as nothing is posted.
  Status connect(const Path& path, const QueueEnd& peer);
  // Moves it to ERR: nothing moves any more in either direction, and requests that had begun are flushed.
  void stop() noexcept;
  // Destroys it: the device touches no memory for it afterwards. Waits until all its events are acknowledged.
  void destroy() noexcept;

  // --- For any thread.

  // Returns the numbers that the peer needs. The PSN is random, so that packets of an earlier queue pair with the same
  // number, still in the network, are not mistaken for this one's.
  QueueEnd end() const noexcept { return {number_, psn_}; }
  uint32_t number() const noexcept { return number_; }
  uint32_t slots() const noexcept { return slots_; }
  uint32_t inline_bytes() const noexcept { return inline_bytes_; }
  bool stopped() const noexcept { return stopped_.load(std::memory_order_acquire); }
  bool destroyed() const noexcept { return destroyed_.load(std::memory_order_acquire); }

  // --- For the domain's thread, until it requests stop().

  // Posts through the library. Returns 0, or an error and the first request that was not taken.
  int post(abi::ibv_send_wr* first, abi::ibv_send_wr** refused) noexcept {
    return resources_.device->context()->ops.post_send(qp_.get(), first, refused);
  }

 private:
  QueuePair(const DomainResources& resources, Owned<abi::ibv_qp> qp, const abi::ibv_qp_cap& cap);
  Status modify(abi::ibv_qp_attr& attr, int mask, const char* to);

  const DomainResources& resources_;
  Owned<abi::ibv_qp> qp_;
  const uint32_t number_;
  const uint32_t psn_;
  const uint32_t slots_;  // rounded up by the device
  const uint32_t inline_bytes_;
  std::atomic<bool> stopped_{false};
  std::atomic<bool> destroyed_{false};
};

}  // namespace kvc::verbs
