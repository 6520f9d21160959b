// QueuePair: one reliable connected queue pair. Made, connected and ended on the control thread, where each of these is
// a command to the device; posted on by the thread that drives the domain.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "providers/verbs/device.h"
#include "providers/verbs/handle.h"
#include "providers/verbs/queues.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs {

class QueuePair {
 public:
  // --- Control thread; all of it blocks.

  // A queue pair in INIT: it exists, takes nothing in and sends nothing. `access`: what its peer may do to our memory.
  static Result<std::shared_ptr<QueuePair>> create(const Queues& queues, const ReceiveQueue& receives, uint32_t slots,
                                                   unsigned access);
  // INIT to RTR to RTS: it takes in what the peer sends, numbered from the peer's PSN on, and may send, numbered from its
  // own. The peer need not be ready as long as nothing is posted.
  Status connect(const Path& path, const QueueEnd& peer);
  // To ERR: nothing moves any more in either direction, and what had begun is flushed.
  void stop() noexcept;
  // From then on the device touches no memory for it. Waits until all events about it are acknowledged.
  void destroy() noexcept;

  // --- Any thread.

  // What the peer needs to know; the PSN is random, so that what is left in the network of an earlier queue pair of the
  // same number is not taken for ours.
  QueueEnd end() const noexcept { return {number_, psn_}; }
  uint32_t number() const noexcept { return number_; }
  uint32_t slots() const noexcept { return slots_; }
  uint32_t inline_bytes() const noexcept { return inline_bytes_; }
  bool stopped() const noexcept { return stopped_.load(std::memory_order_acquire); }
  bool destroyed() const noexcept { return destroyed_.load(std::memory_order_acquire); }

  // --- The driving thread, until it asks for stop().

  // The library's own: 0, or an error, with the first request that was not taken.
  int post(abi::ibv_send_wr* first, abi::ibv_send_wr** refused) noexcept {
    return queues_.device->context()->ops.post_send(qp_.get(), first, refused);
  }

 private:
  QueuePair(const Queues& queues, Owned<abi::ibv_qp> qp, const abi::ibv_qp_cap& cap);
  Status modify(abi::ibv_qp_attr& attr, int mask, const char* to);

  const Queues& queues_;
  Owned<abi::ibv_qp> qp_;
  const uint32_t number_;
  const uint32_t psn_;
  const uint32_t slots_;  // the device rounds up
  const uint32_t inline_bytes_;
  std::atomic<bool> stopped_{false};
  std::atomic<bool> destroyed_{false};
};

}  // namespace kvc::verbs
