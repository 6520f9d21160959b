// MessageWindow: which of a peer's numbered messages have arrived, so that a message that was sent twice is taken once.
#pragma once

#include <cstdint>
#include <unordered_set>

namespace kvc {

class MessageWindow {
 public:
  bool seen(uint32_t sequence) const { return sequence - floor_ >= kHalf || above_.contains(sequence); }
  // Records a number that has not been seen.
  void add(uint32_t sequence) {
    // A number may never arrive (its send was cancelled while a link was down) and leaves a gap below the others. The
    // gap is closed after kWidth later numbers, when no older message can still be in flight. A sender has 8 messages
    // in flight on each link and begins no new one while it waits to repeat a message.
    if (sequence - floor_ > kWidth) {
      floor_ = sequence - kWidth;
      std::erase_if(above_, [this](uint32_t number) { return number - floor_ >= kHalf; });
    }
    above_.insert(sequence);
    while (above_.erase(floor_) > 0) ++floor_;
  }

 private:
  static constexpr uint32_t kHalf = 1U << 31;  // numbers wrap around: what lies half the range ahead counts as behind
  static constexpr uint32_t kWidth = 1U << 16;

  uint32_t floor_ = 0;                  // all numbers below have arrived or never will
  std::unordered_set<uint32_t> above_;  // numbers above that have arrived
};

}  // namespace kvc
