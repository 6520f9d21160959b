// PollLoop: the loop of a transfer thread. It works while it has work, then polls for a short time, then sleeps on
// descriptors. An idle transfer engine therefore uses no CPU.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/unique_fd.h"
#include "base/waker.h"

namespace kvc {

class PollLoop {
 public:
  // The longest sleep while a step has to be repeated (a fence, a revoked key): no descriptor reports its end.
  static constexpr std::chrono::milliseconds kRetry{1};

  // The work of the thread.
  class Work {
   public:
    virtual ~Work() = default;
    // One round of work. Returns true if anything was done.
    virtual bool turn() = 0;
    // Called before the thread sleeps. Returns false if work has arrived meanwhile.
    virtual bool prepare_sleep() = 0;
    // The longest sleep without an event on a descriptor. No value: no limit.
    virtual std::optional<std::chrono::milliseconds> longest_sleep() const = 0;
  };

  // `waker`: the means by which other threads end the sleep.
  explicit PollLoop(std::shared_ptr<Waker> waker) : waker_(std::move(waker)) {}

  // Names the calling thread, pins it to the core `cpu` (-1: no pinning) and opens the descriptors for sleeping.
  Status open(const std::string& name, int cpu);
  // Adds a descriptor that ends the sleep when it is readable.
  Status watch(int fd);
  void forget(int fd);

  // Runs `work` on the calling thread until stop(). An idle thread polls for `spin` before it sleeps.
  void run(Work& work, std::chrono::microseconds spin);
  // Any thread.
  void stop();
  void wake() noexcept { waker_->wake(); }
  void nudge() noexcept { waker_->nudge(); }

 private:
  const std::shared_ptr<Waker> waker_;
  std::atomic<bool> stopping_{false};
  UniqueFd epoll_fd_;
};

}  // namespace kvc
