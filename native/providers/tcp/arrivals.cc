#include "providers/tcp/arrivals.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <utility>

#include "providers/tcp/socket.h"

namespace kvc::tcp {

Result<std::shared_ptr<Arrivals>> Arrivals::create() {
  UniqueFd bell(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!bell) return system_error("tcp", "eventfd", errno);
  return std::make_shared<Arrivals>(std::move(bell));
}

Arrivals::~Arrivals() {
  for (Arrival& arrival : waiting_) hang_up(arrival.socket);
}

void Arrivals::put(uint16_t index, UniqueFd socket) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back({index, std::move(socket)});
  ::eventfd_write(bell_.get(), 1);
}

std::vector<Arrivals::Arrival> Arrivals::take() {
  const std::lock_guard lock(mutex_);
  eventfd_t rung = 0;
  ::eventfd_read(bell_.get(), &rung);
  return std::exchange(waiting_, {});
}

}  // namespace kvc::tcp
