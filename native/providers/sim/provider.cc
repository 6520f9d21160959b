#include "providers/sim/provider.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <cerrno>

#include "providers/sim/domain.h"

namespace kvc::sim {

Result<std::unique_ptr<Domain>> create(const DomainConfig& config, DomainSink& sink) {
  UniqueFd event(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  UniqueFd timer(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!event || !timer || !epoll) return system_error("sim", "create", errno);
  for (const UniqueFd* fd : {&event, &timer}) {
    epoll_event readable{.events = EPOLLIN, .data = {.fd = fd->get()}};
    if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd->get(), &readable) != 0) return system_error("sim", "create", errno);
  }
  auto inbox = std::make_shared<Inbox>(std::move(event));
  return std::unique_ptr<Domain>(
      std::make_unique<SimDomain>(config, sink, std::move(inbox), std::move(timer), std::move(epoll)));
}

}  // namespace kvc::sim
