// DeviceEvents: what the NIC tells beside its completions.
#pragma once

#include <cstdint>
#include <optional>

#include "base/error.h"
#include "providers/verbs/queues.h"

namespace kvc::verbs {

struct DeviceEvent {
  enum class Kind : uint8_t {
    kQueuePairFailed,  // and is in ERR
    kLastReceive,      // a queue pair in ERR has flushed the last receive that it had begun to fill
    kPortDown,
    kPortUp,
    kDeviceFailed,  // or the completion queue, or the receives: nothing works any more
    kOther,
  };
  Kind kind = Kind::kOther;
  uint32_t number = 0;  // of a queue pair or port
  int type = 0;         // the library's own, for its words
};

// The next event, acknowledged: the end of a queue pair waits for that. Nothing: there is none. The domain's thread.
std::optional<DeviceEvent> next_event(const Queues& queues) noexcept;

// The library's words for an event, as the reason why a link is down.
Error event_error(const Queues& queues, int type);

}  // namespace kvc::verbs
