// MessageWindow: which of a peer's numbered messages have arrived, so that one that was sent twice is taken once.
#pragma once

#include <cstdint>
#include <unordered_set>

namespace kvc {

class MessageWindow {
 public:
  bool seen(uint32_t sequence) const { return sequence - floor_ >= kHalf || above_.contains(sequence); }
  // Of a number that was not seen.
  void add(uint32_t sequence) {
    // A number that never comes (its send was given up while a link was down) leaves a gap below the others. It is
    // closed once they are so many that nothing older can still be on its way: a sender has 8 in flight on each link,
    // and begins no new ones while it waits to send one again.
    if (sequence - floor_ > kWidth) {
      floor_ = sequence - kWidth;
      std::erase_if(above_, [this](uint32_t number) { return number - floor_ >= kHalf; });
    }
    above_.insert(sequence);
    while (above_.erase(floor_) > 0) ++floor_;
  }

 private:
  static constexpr uint32_t kHalf = 1U << 31;  // numbers go round: what lies half a turn ahead is behind
  static constexpr uint32_t kWidth = 1U << 16;

  uint32_t floor_ = 0;                  // all below have arrived, or never will
  std::unordered_set<uint32_t> above_;  // those above that have
};

}  // namespace kvc
