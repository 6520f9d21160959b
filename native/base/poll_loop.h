// PollLoop: how a thread of the engine waits: it works while there is something to do, then looks for more for a while, then
// sleeps on descriptors, so that an idle engine uses no CPU.
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
  // The longest sleep while something has to be asked again (a fence, a revoked key): it ends without a descriptor saying
  // so.
  static constexpr std::chrono::milliseconds kRetry{1};

  // What the thread does.
  class Work {
   public:
    virtual ~Work() = default;
    // True if anything was done.
    virtual bool turn() = 0;
    // The thread is about to sleep. False: there is work already.
    virtual bool prepare_sleep() = 0;
    // How long it may sleep although no descriptor says anything; nothing: as long as it likes.
    virtual std::optional<std::chrono::milliseconds> longest_sleep() const = 0;
  };

  // `waker`: how other threads end the sleep.
  explicit PollLoop(std::shared_ptr<Waker> waker) : waker_(std::move(waker)) {}

  // Names the calling thread, pins it to the core (-1: not), and gets ready to sleep.
  Status open(const std::string& name, int cpu);
  // The descriptor ends the sleep when it is readable.
  Status watch(int fd);
  void forget(int fd);

  // Runs `work` on the calling thread until stop(). Spins for `spin` before it sleeps.
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
