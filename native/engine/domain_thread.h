// DomainThread: an additional transfer thread. It drives some of the domains and nothing else. The scheduling thread
// decides what is posted on them and handles the outcome (domain_proxy.h).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/latch.h"
#include "base/poll_loop.h"
#include "base/submission_queue.h"
#include "engine/domain_proxy.h"
#include "lane/domain.h"

namespace kvc {

class DomainThread final : private PollLoop::Work {
 public:
  explicit DomainThread(std::shared_ptr<Waker> waker) : loop_(std::move(waker)) {}
  DomainThread(const DomainThread&) = delete;
  DomainThread& operator=(const DomainThread&) = delete;
  // Stops the thread, after its domains have ended. Blocks.
  ~DomainThread() override;

  // Starts the thread and blocks until it runs. After a failure there is no thread. `cpu`: the core to pin to; -1: no
  // pinning.
  Status start(const std::string& name, int cpu, std::chrono::microseconds spin);

  // Opens a domain on this thread and returns its proxy to the caller. Blocks, as the destructor of the proxy does.
  Result<OpenedDomain> open(const DomainFactory& factory, const DomainConfig& config, ControlQueue& control);

  // Any thread.
  void nudge() noexcept { loop_.nudge(); }

 private:
  struct Task {
    std::function<void()> run;
    Task* next = nullptr;
  };
  void call(const std::function<void()>& f);

  bool turn() override;
  bool prepare_sleep() override;
  std::optional<std::chrono::milliseconds> longest_sleep() const override;

  PollLoop loop_;
  std::thread thread_;
  SubmissionQueue<Task> tasks_;
  std::vector<std::unique_ptr<DrivenDomain>> domains_;  // used on the thread only
};

}  // namespace kvc
