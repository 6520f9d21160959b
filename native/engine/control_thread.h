// ControlThread: a thread of the engine for what may block.
//
// An engine has two. One makes and ends links. The other registers and deregisters memory, which takes 30 ms a GiB and
// more: on the first thread it would hold up every fence, and the settlement of broken links, for as long.
// A ControlThread carries out tasks in the order in which they came, and lets connectors serve what comes to them by
// itself. It may wait for the worker; the worker never waits for it.
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
  // `after`: called on the thread after each task.
  explicit ControlThread(std::function<void()> after) : after_(std::move(after)) {}
  // Stops if it runs.
  ~ControlThread() override;

  // `name`: the kernel keeps its first 15 characters.
  Status start(const std::string& name);
  // Carries out what is left and ends the thread. Blocks.
  void stop();

  bool runs() const noexcept { return thread_.joinable(); }

  void run(std::function<void()> task) override;
  // Runs `task` on the thread and waits until it is done: false if that takes longer than `timeout`. The task still runs then,
  // after those before it. Blocks. Not on the thread itself.
  bool run_for(std::function<void()> task, Timeout timeout) {
    const auto latch = std::make_shared<Latch>();
    run([task = std::move(task), latch] {
      task();
      latch->set_done();
    });
    return latch->wait_for(timeout);
  }

  // Runs `f` (which returns a Result) on the thread and returns what it returns. Blocks. Not on the thread itself.
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

  // On the thread: from now on the connector is served, until unwatch_all().
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

  std::vector<Connector*> watched_;  // the thread's
};

}  // namespace kvc
