// DeviceEvents: the NIC's asynchronous events, which it reports beside completions.
#pragma once

#include <cstdint>
#include <optional>

#include "base/error.h"
#include "providers/verbs/domain_resources.h"

namespace kvc::verbs {

struct DeviceEvent {
  enum class Kind : uint8_t {
    kQueuePairFailed,  // a queue pair has failed and is in ERR
    kLastReceive,      // a queue pair in ERR has flushed the last receive that it had begun to fill
    kPortDown,
    kPortUp,
    kDeviceFailed,  // the device, the completion queue or the receives have failed: nothing works any more
    kOther,
  };
  Kind kind = Kind::kOther;
  uint32_t number = 0;  // number of the queue pair or port
  int type = 0;         // the library's event type, for its text
};

// Returns the next event, or nothing if there is none. The event is acknowledged, because destroying a queue pair waits
// for that. Used on the domain's thread only.
std::optional<DeviceEvent> next_event(const DomainResources& resources) noexcept;

// Returns the library's text for an event, as the reason why a link is down.
Error event_error(const DomainResources& resources, int type);

}  // namespace kvc::verbs
