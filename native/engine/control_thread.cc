#include "engine/control_thread.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <vector>

#include "engine/start_thread.h"

namespace kvc {

ControlThread::~ControlThread() { stop(); }

Status ControlThread::start(const std::string& name) {
  wake_ = UniqueFd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_) return system_error({}, "eventfd", errno);
  if (Status started = start_thread(thread_, [this] { loop(); }); !started) return started;
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
  return {};
}

void ControlThread::stop() {
  if (!thread_.joinable()) return;
  run([this] {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  });
  thread_.join();
}

void ControlThread::run(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

void ControlThread::watch(Connector& connector) {
  if (connector.fd() >= 0) watched_.push_back(&connector);
}

// False: it has to stop, and nothing is left to do.
bool ControlThread::run_tasks() {
  for (bool ran = false;; ran = true) {
    std::function<void()> task;
    bool stopping = false;
    {
      const std::lock_guard lock(mutex_);
      stopping = stopping_;
      if (!tasks_.empty()) {
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
    }
    // Of the task before: the next one may take seconds. After the lock, which keeps what a waker reads from overtaking what
    // that task has written.
    if (ran) after_();
    if (!task) return !stopping;
    task();
  }
}

void ControlThread::loop() {
  std::vector<pollfd> fds;
  while (run_tasks()) {
    fds.assign(1, {wake_.get(), POLLIN, 0});
    for (const Connector* connector : watched_) fds.push_back({connector->fd(), POLLIN, 0});
    ::poll(fds.data(), fds.size(), -1);
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof(count));
    for (size_t i = 1; i < fds.size(); ++i) {
      if (fds[i].revents != 0) watched_[i - 1]->serve();
    }
  }
}

}  // namespace kvc
