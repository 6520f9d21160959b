// Sleep: whether a domain's thread sleeps, in the first word of the board that all its peers map.
#pragma once

#include <atomic>
#include <cstdint>

#include "providers/same_host/channel.h"

namespace kvc::same_host {

// The domain's thread; nothing here blocks.
class Sleep {
 public:
  // `word`, of our own board, outlives this.
  explicit Sleep(SharedWord& word) noexcept : word_(word) {}

  // The thread is about to sleep. Look for work after this: a sender either sees it, or we see what it has put.
  void announce() noexcept {
    if (asleep_) return;
    asleep_ = true;
    word_.store(word_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
  }
  // The thread is awake; at the beginning of each turn.
  void end() noexcept {
    if (!asleep_) return;
    asleep_ = false;
    just_woken_ = true;
    word_.store(word_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  // Whether this turn looks at the descriptors; at the end of each. After a sleep it does, but not before what the
  // wake-up was about: `happened` says whether the turn has found that.
  bool look_due(bool happened) noexcept {
    ++turns_;
    if ((!just_woken_ || happened) && turns_ % kTurnsPerLook != 0) return false;
    just_woken_ = false;
    return true;
  }

 private:
  // A system call of 300 ns each turn would be most of an idle turn. 16 busy turns are 2 ms, which the news of a socket
  // can wait.
  static constexpr uint32_t kTurnsPerLook = 16;

  SharedWord& word_;
  uint32_t turns_ = 0;
  bool asleep_ = false;
  bool just_woken_ = false;
};

}  // namespace kvc::same_host
