// TransferThread: the transfer thread that drives a DomainGroup.
//
// Each turn, it carries out the submitted commands. It posts layers whose signal value has been reached, and a quantum
// of the ready work. It then polls the domains and ends what has ended.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/latch.h"
#include "base/poll_loop.h"
#include "base/submission_queue.h"
#include "base/waker.h"
#include "engine/command.h"
#include "engine/command_pool.h"
#include "engine/domain_group.h"
#include "engine/domain_thread.h"

namespace kvc {

class TransferThread final : private PollLoop::Work {
 public:
  TransferThread(const EngineConfig& config, Lanes& lanes, DomainGroup& group, std::shared_ptr<Waker> waker,
                 Stats& stats);
  // Calls stop().
  ~TransferThread() override;

  // Starts the thread and opens the lanes on it, or on `others`, which must outlive it. Blocks until the lanes are
  // open. After a failure there is no thread.
  Status start(ControlQueue& control, std::span<const std::unique_ptr<DomainThread>> others);
  // Carries out the submitted commands, closes the group on the thread and ends the thread. Later commands never run.
  // Blocks.
  void stop();
  // Drops commands that were submitted after stop(), and releases what they hold.
  void drop_commands() {
    queue_.drain([](std::unique_ptr<Command> command) {
      if (auto* const start = std::get_if<StartScatter>(&command->body)) start->run->abandon();
    });
  }

  // Submits a command of type Kind, made from `args`. Any thread; never blocks.
  template <typename Kind, typename... Args>
  void submit(Args&&... args) {
    std::unique_ptr<Command> command = take_command();
    command->body.emplace<Kind>(Kind{std::forward<Args>(args)...});
    push(std::move(command));
    wake();
  }
  // The steps of submit(), for callers that push under a lock and wake after releasing it.
  std::unique_ptr<Command> take_command() { return pool_.take(); }
  void push(std::unique_ptr<Command> command) { queue_.push(std::move(command)); }
  void wake() { loop_.wake(); }

  // Runs `f` (which returns a Result) on the thread and returns the result. Blocks for one turn.
  template <typename F>
  std::invoke_result_t<F> call(const char* operation, F f) {
    using R = std::invoke_result_t<F>;
    if (on_thread()) return R(blocking_in_callback(operation));
    std::optional<R> result;
    Latch latch;
    submit<Call>([&] {
      result.emplace(f());
      latch.set_done();
    });
    latch.wait();
    return std::move(*result);
  }

  // Runs `step` once a turn until it returns true. After `timeout`, and at least one run, it returns kTimeout with
  // `message`. The step must own what it uses. Blocks.
  Status call_until(const char* operation, std::function<bool()> step, Timeout timeout, std::string message);
  // The same for a step that returns its outcome. No value: run it again.
  Status call_until(const char* operation, std::function<std::optional<Status>()> step, Timeout timeout,
                    std::string message);

  // The error of a blocking method that was called on the transfer thread, where it would wait for itself.
  static Error blocking_in_callback(const char* operation);
  bool on_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  struct Step {
    std::function<bool()> run;
    std::shared_ptr<Latch> latch;
  };

  Status open(ControlQueue& control, std::span<const std::unique_ptr<DomainThread>> others);
  bool turn() override;
  bool prepare_sleep() override;
  std::optional<std::chrono::milliseconds> longest_sleep() const override;
  bool run_commands();
  void apply(Command& command);
  bool run_steps();

  const EngineConfig& config_;
  Lanes& lanes_;
  DomainGroup& group_;
  Stats& stats_;
  CommandPool pool_;
  SubmissionQueue<Command> queue_;
  PollLoop loop_;
  std::thread thread_;
  std::vector<Step> steps_;  // used on the thread only
};

}  // namespace kvc
