#include "providers/sim/provider.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>

#include "providers/sim/connector.h"
#include "providers/sim/domain.h"

namespace kvc::sim {

Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& /*control*/) {
  UniqueFd event(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  Result<TimerFd> timer = TimerFd::create("sim");
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!timer) return timer.error();
  if (!event || !epoll) return system_error("sim", "create", errno);
  for (const int fd : {event.get(), timer.value().fd()}) {
    epoll_event readable{.events = EPOLLIN, .data = {.fd = fd}};
    if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &readable) != 0) return system_error("sim", "create", errno);
  }
  auto inbox = std::make_shared<Inbox>(std::move(event));
  const std::shared_ptr<Fabric> fabric = Fabric::get(config.fabric);
  // A NIC without a name belongs to this domain and ends with it.
  const std::shared_ptr<Nic> nic = config.device.empty() ? std::make_shared<Nic>() : fabric->nic(config.device);
  OpenedDomain opened;
  opened.connector = std::make_unique<SimConnector>(config.fabric, fabric, nic, inbox);
  opened.domain = std::make_unique<SimDomain>(config, fabric->next_domain(), fabric, inbox, std::move(timer.value()),
                                              std::move(epoll));
  return opened;
}

}  // namespace kvc::sim
