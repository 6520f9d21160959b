#include "engine/worker.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <string>

namespace kvc {

namespace {

// While a step waits (a fence, a revoked key) the worker sleeps this long at most: steps end without a descriptor
// saying so.
constexpr int kRetryMilliseconds = 1;

std::shared_ptr<Request> request_of(const AddWrite& add) {
  return std::make_shared<Request>(add.source->shared_from_this(), add.target->shared_from_this(), add.bytes,
                                   add.immediate, add.write);
}

template <typename... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};

}  // namespace

Worker::Worker(const EngineConfig& config, DomainGroup& group, std::shared_ptr<Waker> waker, Stats& stats)
    : config_(config), group_(group), waker_(std::move(waker)), stats_(stats) {}

Worker::~Worker() { stop(); }

Status Worker::start() {
  Completion opened;
  Status status;
  thread_ = std::thread([&, this] {
    status = prepare();
    const bool ok = status.ok();
    opened.set_done();  // `status` and `opened` are the starting thread's: not touched after this
    if (ok) run();
    group_.close();
  });
  opened.wait();
  if (!status) thread_.join();
  return status;
}

void Worker::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_seq_cst);
  waker_->wake();
  thread_.join();
}

Error Worker::blocking_in_callback(const char* operation) {
  return Error{ErrorCode::kInvalidArgument,
               {},
               {},
               operation,
               "blocks, and was called from an event callback on the worker thread: call it from another thread"};
}

Status Worker::call_until(const char* operation, std::function<bool()> step, Timeout timeout, std::string message) {
  if (on_thread()) return blocking_in_callback(operation);
  auto completion = std::make_shared<Completion>();
  submit<Call>([this, completion, step = std::move(step)] { steps_.push_back({step, completion}); });
  if (completion->wait_for(timeout)) return {};
  return Error{ErrorCode::kTimeout, {}, {}, operation, std::move(message)};
}

Status Worker::prepare() {
  // 15 characters is what the kernel keeps.
  pthread_setname_np(pthread_self(), ("kvc-" + config_.name).substr(0, 15).c_str());
  if (config_.worker_cpu >= 0) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    if (config_.worker_cpu < CPU_SETSIZE) CPU_SET(config_.worker_cpu, &cpus);
    if (const int error = pthread_setaffinity_np(pthread_self(), sizeof(cpus), &cpus); error != 0) {
      Error refused = system_error({}, "pin worker", error);
      refused.code = ErrorCode::kInvalidArgument;
      refused.message += ": core " + std::to_string(config_.worker_cpu) + " is not one this process may run on";
      return refused;
    }
  }
  // After pinning, so that what a domain allocates lies near the core that uses it.
  if (Status status = group_.open(); !status) return status;
  epoll_fd_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_fd_) return system_error({}, "epoll_create1", errno);
  std::vector<int> fds = group_.fds();
  fds.push_back(waker_->fd());
  for (const int fd : fds) {
    epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
    if (epoll_ctl(epoll_fd_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return system_error({}, "epoll_ctl", errno);
  }
  return {};
}

void Worker::run() {
  using Clock = std::chrono::steady_clock;
  const auto spin = std::chrono::microseconds(config_.spin_us);
  Clock::time_point idle_since{};
  bool idle = false;
  // Acquires what its owner has done before it stopped us: closing takes apart what others have read.
  while (!stopping_.load(std::memory_order_acquire)) {
    bool busy = run_commands();
    busy |= group_.turn();
    busy |= run_steps();
    if (busy) {
      idle = false;
      continue;
    }
    const Clock::time_point now = Clock::now();
    if (!idle) {
      idle = true;
      idle_since = now;
    }
    if (now - idle_since < spin) {
      // Yields instead of pausing: where the peer's worker shares this core, spinning would keep it from doing what we
      // wait for. Measured on two busy cores, one way, pausing and yielding: tcp 30 and 10 us, host 28 and 5 us.
      // Where nobody else wants the core it returns in 0.3 us.
      sched_yield();
      continue;
    }
    sleep();
    idle = false;  // what woke it up tends to come in bursts
  }
}

void Worker::sleep() {
  waker_->announce_sleep();
  const bool work = !queue_.empty() || stopping_.load(std::memory_order_seq_cst) || !group_.prepare_sleep();
  if (!work) {
    Stats::add(stats_.sleeps, 1);
    std::array<epoll_event, 1> events;
    const std::optional<std::chrono::milliseconds> longest = group_.longest_sleep();
    const int limit = !steps_.empty() ? kRetryMilliseconds : longest ? static_cast<int>(longest->count()) : -1;
    // One descriptor is enough to know: every domain is polled in the next turn. EINTR is a wake-up like another.
    epoll_wait(epoll_fd_.get(), events.data(), events.size(), limit);
  }
  waker_->awake();
}

bool Worker::run_commands() {
  // What was retired before may be meant by commands that are in the queue now, and by none that come later.
  const size_t retired = group_.scheduler().retired();
  const bool any = queue_.drain([this](std::unique_ptr<Command> command) {
    apply(*command);
    pool_.give(std::move(command));
  });
  group_.scheduler().release(retired);
  return any;
}

void Worker::apply(Command& command) {
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
                 [&](Fire& fire) { scheduler.fired(std::move(fire.set)); },
                 [&](Call& call) { call.run(); },
             },
             command.body);
}

bool Worker::run_steps() {
  return std::erase_if(steps_, [](Step& step) {
           if (step.completion->abandoned()) return true;
           if (!step.run()) return false;
           step.completion->set_done();
           return true;
         }) > 0;
}

}  // namespace kvc
