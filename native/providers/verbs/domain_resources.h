// DomainResources: the objects that both halves of a domain use: the device, the completion queue and the receives that all
// links share. They are created when the domain opens and destroyed with its connector, which outlives everything made
// from it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "providers/verbs/device.h"
#include "providers/verbs/handle.h"
#include "providers/verbs/receive_queue.h"
#include "providers/verbs/send_buffers.h"
#include "providers/verbs/tuning.h"

namespace kvc::verbs {

// Opened and destroyed on the control thread. Immutable in between, except for members marked as the domain's.
struct DomainResources {
  static Result<std::unique_ptr<DomainResources>> open(std::unique_ptr<Device> device, const Tuning& tuning);

  const std::unique_ptr<Device> device;
  const Tuning tuning;
  const uint32_t key_half;  // the upper half of all keys of this domain
  Owned<abi::ibv_comp_channel> channel{nullptr, nullptr};
  // One queue for all links: one call polls it, and one arms the wake-up.
  Owned<abi::ibv_cq> completions{nullptr, nullptr};
  uint32_t entries = 0;  // size of the completion queue
  uint32_t credits = 0;  // entries that are not reserved for receives

  // Used by the domain. A WriteImm uses up a receive like a message does. So they have separate queues: on a shared
  // one, either could starve the other.
  std::unique_ptr<ReceiveQueue> write_receives;
  std::unique_ptr<ReceiveQueue> message_receives;
  std::unique_ptr<SendBuffers> buffers;

  // The event by which the device has failed, written by the domain. If set, no link can be made any more.
  static constexpr int kSound = -1;
  std::atomic<int> failed_by{kSound};

 private:
  DomainResources(std::unique_ptr<Device> opened, const Tuning& numbers);
};

}  // namespace kvc::verbs
