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

// Runs all tasks. Returns false if the thread has to stop and no task is left.
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
    // Reports the previous task before the next one, which may take seconds. It is called after the lock was taken,
    // because the lock keeps the reads of a waker behind the writes of that task.
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
