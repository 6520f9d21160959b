// TimerFd: a descriptor that becomes readable at a set time, for threads that sleep in epoll.
#pragma once

#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/unique_fd.h"

namespace kvc {

// One owner thread. No call blocks.
class TimerFd {
 public:
  using Clock = std::chrono::steady_clock;

  static Result<TimerFd> create(std::string_view provider) {
    TimerFd timer;
    timer.fd_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
    if (!timer.fd_) return system_error(provider, "timerfd_create", errno);
    return timer;
  }
  TimerFd() = default;

  int fd() const noexcept { return fd_.get(); }
  // Makes the descriptor readable from `when` on (at once if `when` has passed). No value disarms it. A new setting
  // replaces the old one, so a readable descriptor becomes unreadable until `when`. An unchanged setting costs no
  // system call.
  void arm(std::optional<Clock::time_point> when) noexcept {
    if (when == armed_ && (!when || *when > Clock::now())) return;
    armed_ = when;
    itimerspec setting{};  // all zeros: disarmed
    if (when) {
      const auto since_boot = std::max(when->time_since_epoch(), Clock::duration(1));
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_boot);
      setting.it_value.tv_sec = seconds.count();
      setting.it_value.tv_nsec = std::chrono::nanoseconds(since_boot - seconds).count();
    }
    ::timerfd_settime(fd_.get(), TFD_TIMER_ABSTIME, &setting, nullptr);
  }

 private:
  UniqueFd fd_;
  std::optional<Clock::time_point> armed_;
};

}  // namespace kvc
