// ControlThread: a thread of the transfer engine for calls that may block.
//
// A transfer engine has two. One makes and ends links. The other registers and deregisters memory, which takes 30 ms a
// GiB and more. On the first thread, this would delay every fence and the settlement of broken links for as long. A
// ControlThread runs its tasks in the order of submission and lets connectors serve incoming work. It may wait for the
// transfer thread. The transfer thread never waits for it.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/latch.h"
#include "base/unique_fd.h"
#include "lane/control_queue.h"
#include "lane/domain.h"

namespace kvc {

class ControlThread final : public ControlQueue {
 public:
  // `after` is called on the thread after each task.
  explicit ControlThread(std::function<void()> after) : after_(std::move(after)) {}
  // Calls stop().
  ~ControlThread() override;

  // Starts the thread. The kernel keeps the first 15 characters of `name`.
  Status start(const std::string& name);
  // Runs the remaining tasks and ends the thread. Blocks.
  void stop();

  bool runs() const noexcept { return thread_.joinable(); }

  void run(std::function<void()> task) override;
  // Runs `task` on the thread and waits for its end. Returns false if that takes longer than `timeout`; the task still
  // runs in its turn. Blocks. Must not be called on the thread itself.
  bool run_for(std::function<void()> task, Timeout timeout) {
    const auto latch = std::make_shared<Latch>();
    run([task = std::move(task), latch] {
      task();
      latch->set_done();
    });
    return latch->wait_for(timeout);
  }

  // Runs `f` (which returns a Result) on the thread and returns the result. Blocks. Must not be called on the thread
  // itself.
  template <typename F>
  std::invoke_result_t<F> call(F f) {
    std::optional<std::invoke_result_t<F>> result;
    Latch latch;
    run([&] {
      result.emplace(f());
      latch.set_done();
    });
    latch.wait();
    return std::move(*result);
  }

  // Serves the connector until unwatch_all(). Called on the thread.
  void watch(Connector& connector);
  void unwatch_all() { watched_.clear(); }

 private:
  void loop();
  bool run_tasks();

  const std::function<void()> after_;
  std::thread thread_;
  UniqueFd wake_;
  std::mutex mutex_;
  std::deque<std::function<void()>> tasks_;  // guarded by mutex_
  bool stopping_ = false;                    // guarded by mutex_

  std::vector<Connector*> watched_;  // used on the thread only
};

}  // namespace kvc
