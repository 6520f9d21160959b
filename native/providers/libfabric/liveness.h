// Liveness: whether a link's peer still speaks. An idle reliable datagram says nothing of its other end.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>

#include "providers/libfabric/tuning.h"

namespace kvc::libfabric {

using Clock = std::chrono::steady_clock;

// The driving thread.
class Liveness {
 public:
  explicit Liveness(const Tuning& tuning) : tuning_(tuning) {}

  void heard() noexcept { heard_ = true; }
  enum class Silence : uint8_t {
    kNone,
    kLong,     // ask for a word
    kTooLong,  // it counts as gone
  };
  // Once in a while, `gap` after the last time. `connected`: the peer has said its first word.
  Silence look(Clock::time_point now, Clock::duration gap, bool connected) noexcept {
    // Who was stopped himself does not blame the peer for the silence.
    if (std::exchange(heard_, false) || gap > tuning_.look + tuning_.ping_after) last_heard_ = now;
    const auto silence = now - last_heard_;
    if (silence > (connected ? tuning_.silence : tuning_.hello)) return Silence::kTooLong;
    return connected && silence >= tuning_.ping_after ? Silence::kLong : Silence::kNone;
  }

 private:
  const Tuning& tuning_;
  bool heard_ = false;  // since the last look
  Clock::time_point last_heard_ = Clock::now();
};

}  // namespace kvc::libfabric
