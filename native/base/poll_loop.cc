#include "base/poll_loop.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>

#include <cerrno>
#include <utility>

namespace kvc {

Status PollLoop::open(const std::string& name, int cpu) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());  // the kernel keeps 15 characters
  if (cpu >= 0) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &cpus);
    if (const int error = pthread_setaffinity_np(pthread_self(), sizeof(cpus), &cpus); error != 0) {
      Error refused = system_error({}, "pin worker", error);
      refused.code = ErrorCode::kInvalidArgument;
      refused.message +=
          ": this process may not run on core " + std::to_string(cpu) + ". Set worker_cpu to a core that it may use";
      return refused;
    }
  }
  epoll_fd_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_fd_) return system_error({}, "epoll_create1", errno);
  return watch(waker_->fd());
}

Status PollLoop::watch(int fd) {
  epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
  if (epoll_ctl(epoll_fd_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return system_error({}, "epoll_ctl", errno);
  return {};
}

void PollLoop::forget(int fd) { epoll_ctl(epoll_fd_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void PollLoop::run(Work& work, std::chrono::microseconds spin) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point idle_since{};
  bool idle = false;
  // Acquires all that the owner did before stop(): closing takes apart what other threads have read.
  while (!stopping_.load(std::memory_order_acquire)) {
    if (work.turn()) {
      idle = false;
      continue;
    }
    const Clock::time_point now = Clock::now();
    if (!std::exchange(idle, true)) idle_since = now;
    if (now - idle_since < spin) {
      // Yields instead of pausing. If the peer's transfer thread shares this core, spinning would delay the work that
      // this thread waits for. One-way latency on two busy cores, pausing and yielding: tcp 30 and 10 us, host 28 and 5
      // us. If no other thread needs the core, sched_yield() returns in 0.3 us.
      sched_yield();
      continue;
    }
    waker_->announce_sleep();
    if (!stopping_.load(std::memory_order_seq_cst) && !waker_->take_nudge() && work.prepare_sleep()) {
      const std::optional<std::chrono::milliseconds> longest = work.longest_sleep();
      // One event is enough, because the next turn looks at everything. EINTR is a wake-up like any other.
      epoll_event event;
      epoll_wait(epoll_fd_.get(), &event, 1, longest ? static_cast<int>(longest->count()) : -1);
    }
    waker_->awake();
    idle = false;  // events that end a sleep tend to come in bursts
  }
}

void PollLoop::stop() {
  stopping_.store(true, std::memory_order_seq_cst);
  waker_->wake();
}

}  // namespace kvc
