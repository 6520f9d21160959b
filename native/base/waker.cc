#include "base/waker.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace kvc {

Result<std::shared_ptr<Waker>> Waker::create() {
  UniqueFd fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!fd) return system_error({}, "eventfd", errno);
  return std::make_shared<Waker>(std::move(fd));
}

void Waker::signal() noexcept {
  const uint64_t one = 1;
  // The write fails only if the counter is full, and the descriptor is readable in that case.
  [[maybe_unused]] const ssize_t written = write(fd_.get(), &one, sizeof(one));
}

void Waker::awake() noexcept {
  sleeping_.store(false, std::memory_order_seq_cst);
  // Reads even if no signal seems to be pending: a thread that took back the last announcement may be preempted before
  // its signal. That signal arrives during this sleep, and an unread signal would end every later sleep at once.
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(fd_.get(), &count, sizeof(count));
}

}  // namespace kvc
