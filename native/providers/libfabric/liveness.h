// Liveness: whether a link's peer still sends. An idle reliable datagram connection does not show whether its peer
// exists.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>

#include "providers/libfabric/tuning.h"

namespace kvc::libfabric {

using Clock = std::chrono::steady_clock;

// Used on the driving thread only.
class Liveness {
 public:
  explicit Liveness(const Tuning& tuning) : tuning_(tuning) {}

  void heard() noexcept { heard_ = true; }
  enum class Silence : uint8_t {
    kNone,
    kLong,     // request an answer
    kTooLong,  // the peer counts as gone
  };
  // Call it once in a while, `gap` after the last call. `connected`: the peer has sent its first message.
  Silence look(Clock::time_point now, Clock::duration gap, bool connected) noexcept {
    // If this process itself was stopped, the silence is not the peer's fault.
    if (std::exchange(heard_, false) || gap > tuning_.look + tuning_.ping_after) last_heard_ = now;
    const auto silence = now - last_heard_;
    if (silence > (connected ? tuning_.silence : tuning_.hello)) return Silence::kTooLong;
    return connected && silence >= tuning_.ping_after ? Silence::kLong : Silence::kNone;
  }

 private:
  const Tuning& tuning_;
  bool heard_ = false;  // since the last call of look()
  Clock::time_point last_heard_ = Clock::now();
};

}  // namespace kvc::libfabric
