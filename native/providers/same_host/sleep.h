// Sleep: whether a domain's thread sleeps, in the first word of the board that all its peers map.
#pragma once

#include <atomic>
#include <cstdint>

#include "providers/same_host/channel.h"

namespace kvc::same_host {

// Used on the domain's thread only; nothing here blocks.
class Sleep {
 public:
  // `word` is the first word of our own board, which outlives this.
  explicit Sleep(SharedWord& word) noexcept : word_(word) {}

  // Announces a sleep. Look for work after this call: either a sender sees the announcement, or the look finds what the
  // sender has put.
  void announce() noexcept {
    if (asleep_) return;
    asleep_ = true;
    word_.store(word_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
  }
  // Ends the announced sleep. Call it at the beginning of each turn.
  void end() noexcept {
    if (!asleep_) return;
    asleep_ = false;
    just_woken_ = true;
    word_.store(word_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  // Whether this turn should look at the descriptors. Call it at the end of each turn; `happened` is whether the turn
  // found work. The first turn after a sleep looks if it found no work: the wake-up was about a descriptor then.
  bool look_due(bool happened) noexcept {
    ++turns_;
    if ((!just_woken_ || happened) && turns_ % kTurnsPerLook != 0) return false;
    just_woken_ = false;
    return true;
  }

 private:
  // A system call of 300 ns each turn would be most of an idle turn. 16 busy turns are 2 ms, which an event of a socket
  // can wait.
  static constexpr uint32_t kTurnsPerLook = 16;

  SharedWord& word_;
  uint32_t turns_ = 0;
  bool asleep_ = false;
  bool just_woken_ = false;
};

}  // namespace kvc::same_host
