#include "engine/transfer_thread.h"

#include <chrono>
#include <string>

#include "base/overloaded.h"
#include "engine/start_thread.h"

namespace kvc {

namespace {

RequestRef request_of(const AddWrite& add) {
  return Request::make(add.source->shared_from_this(), add.target->shared_from_this(), add.bytes, add.immediate,
                       add.write);
}

}  // namespace

TransferThread::TransferThread(const EngineConfig& config, Lanes& lanes, DomainGroup& group,
                               std::shared_ptr<Waker> waker, Stats& stats)
    : config_(config), lanes_(lanes), group_(group), stats_(stats), loop_(std::move(waker)) {}

TransferThread::~TransferThread() { stop(); }

Status TransferThread::start(ControlQueue& control, std::span<const std::unique_ptr<DomainThread>> others) {
  Latch opened;
  Status status;
  Status thread = start_thread(thread_, [&, this] {
    status = open(control, others);
    const bool ok = status.ok();
    opened.set_done();  // `status` and `opened` belong to the starting thread and are not touched after this
    if (ok) {
      loop_.run(*this, std::chrono::microseconds(config_.spin_us));
      run_commands();
    }
    group_.close();
  });
  if (!thread) return thread;
  opened.wait();
  if (!status) thread_.join();
  return status;
}

void TransferThread::stop() {
  if (!thread_.joinable()) return;
  loop_.stop();
  thread_.join();
}

Error TransferThread::blocking_in_callback(const char* operation) {
  return Error{ErrorCode::kInvalidArgument,
               {},
               {},
               operation,
               "this call blocks and was made in a callback on the transfer thread: call it from another thread"};
}

Status TransferThread::call_until(const char* operation, std::function<bool()> step, Timeout timeout,
                                  std::string message) {
  if (on_thread()) return blocking_in_callback(operation);
  auto latch = std::make_shared<Latch>();
  submit<Call>([this, latch, step = std::move(step)] { steps_.push_back({step, latch}); });
  if (latch->wait_for_a_try(timeout)) return {};
  return Error{ErrorCode::kTimeout, {}, {}, operation, std::move(message)};
}

Status TransferThread::call_until(const char* operation, std::function<std::optional<Status>()> step, Timeout timeout,
                                  std::string message) {
  // Written on the transfer thread before the completion for which this thread waits.
  const auto outcome = std::make_shared<std::optional<Status>>();
  Status status = call_until(
      operation, [outcome, step = std::move(step)] { return (*outcome = step()).has_value(); }, timeout,
      std::move(message));
  return status ? std::move(**outcome) : status;
}

Status TransferThread::open(ControlQueue& control, std::span<const std::unique_ptr<DomainThread>> others) {
  if (Status opened = loop_.open("kvc-" + config_.name, config_.worker_cpu); !opened) return opened;
  // After pinning, so that a domain allocates memory near the core that uses it.
  if (Status opened = lanes_.open(config_, control, others); !opened) return opened;
  group_.open();
  for (const int fd : group_.fds()) {
    if (Status watched = loop_.watch(fd); !watched) return watched;
  }
  return {};
}

bool TransferThread::turn() {
  bool busy = run_commands();
  busy |= group_.turn();
  busy |= run_steps();
  return busy;
}

bool TransferThread::prepare_sleep() {
  const bool sleeps = queue_.empty() && group_.prepare_sleep();
  if (sleeps) Stats::add(stats_.sleeps, 1);
  return sleeps;
}

std::optional<std::chrono::milliseconds> TransferThread::longest_sleep() const {
  return steps_.empty() ? group_.longest_sleep() : std::optional(PollLoop::kRetry);
}

bool TransferThread::run_commands() {
  // Commands in the queue may refer to objects that were retired before now. Later commands cannot.
  const size_t retired = group_.scheduler().endings().retired();
  const bool any = queue_.drain([this](std::unique_ptr<Command> command) {
    apply(*command);
    pool_.give(std::move(command));
  });
  group_.scheduler().endings().release(retired);
  return any;
}

void TransferThread::apply(Command& command) {
  TransferScheduler& scheduler = group_.scheduler();
  std::visit(Overloaded{
                 [](std::monostate) {},
                 [&](const AddWrite& add) { scheduler.add(*add.transfer, request_of(add)); },
                 [&](const WriteOne& add) {
                   scheduler.add(*add.transfer, request_of(add));
                   scheduler.seal(*add.transfer);
                 },
                 [&](AddRequest& add) {
                   scheduler.add(*add.transfer, std::move(add.request));
                   if (add.seal) scheduler.seal(*add.transfer);
                 },
                 [&](const Arm& arm) { scheduler.arm(std::move(*arm.plan)); },
                 [&](Seal& seal) { scheduler.seal(*seal.transfer); },
                 [&](const StartScatter& start) { scheduler.start(*start.run); },
                 [&](Fire& fire) { scheduler.endings().fired(std::move(*fire.set)); },
                 [&](const Call& call) { (*call.run)(); },
             },
             command.body);
}

bool TransferThread::run_steps() {
  return std::erase_if(steps_, [](Step& step) {
           if (!step.latch->begin()) return true;
           const bool done = step.run();
           step.latch->end(done);
           return done;
         }) > 0;
}

}  // namespace kvc
