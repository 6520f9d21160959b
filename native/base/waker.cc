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
  // Fails only when the counter is full, and then the descriptor is readable anyway.
  [[maybe_unused]] const ssize_t written = write(fd_.get(), &one, sizeof(one));
}

void Waker::awake() noexcept {
  sleeping_.store(false, std::memory_order_seq_cst);
  // Always: who took our last announcement back may have been preempted before it signalled. That signal comes during
  // this sleep, and left unread it would end every later one at once.
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(fd_.get(), &count, sizeof(count));
}

}  // namespace kvc
