// What tests set otherwise.
#pragma once

#include <chrono>

namespace kvc::libfabric {

struct Tuning {
  // How often peers are looked after.
  std::chrono::milliseconds look{1000};
  // A peer that was silent for this long is asked for a word.
  std::chrono::milliseconds ping_after{2000};
  // It counts as gone when none comes: ten times what a loaded machine was seen to stop a worker for.
  std::chrono::milliseconds silence{10000};
  // An offerer's Hello must come within the time that a busy control plane takes to deliver an answer.
  std::chrono::milliseconds hello{30000};
  // How long a link that ends waits for what is under way, and for Bye to arrive: a round trip, with a connection to be
  // made. Bye is said all the same when that is over, or if the link is broken: where there is a stream, the peer finds
  // it there.
  std::chrono::milliseconds bye{50};
  // Each endpoint registers regions for itself, also where the device does not ask for that (FI_MR_ENDPOINT: Slingshot).
  bool memory_per_endpoint = false;
};

}  // namespace kvc::libfabric
