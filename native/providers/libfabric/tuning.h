// Tuning: the libfabric provider's numbers. Tests use other values.
#pragma once

#include <chrono>

namespace kvc::libfabric {

struct Tuning {
  // Interval at which silent peers are looked for.
  std::chrono::milliseconds look{1000};
  // A peer that was silent for this long receives a Ping.
  std::chrono::milliseconds ping_after{2000};
  // A peer that was silent for this long counts as gone. It is ten times the longest stop of a transfer thread that was
  // seen on a loaded machine.
  std::chrono::milliseconds silence{10000};
  // An offerer's Hello must arrive within this time, in which a busy control plane delivers an answer.
  std::chrono::milliseconds hello{30000};
  // Time for which a link that ends waits for its operations in flight, and for Bye to arrive: a round trip, including
  // a new connection. Bye is sent all the same when that time is over, or if the link is broken: on a stream, the peer
  // finds it there.
  std::chrono::milliseconds bye{50};
  // Each endpoint registers regions for itself, even if the device does not require it (FI_MR_ENDPOINT: Slingshot).
  bool memory_per_endpoint = false;
};

}  // namespace kvc::libfabric
