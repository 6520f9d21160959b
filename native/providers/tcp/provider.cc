#include "providers/tcp/provider.h"

#include <utility>

#include "providers/tcp/connector.h"
#include "providers/tcp/domain.h"

namespace kvc::tcp {

Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control) {
  return open(config, control, Tuning{});
}

Result<OpenedDomain> open(const DomainConfig& config, ControlQueue& control, const Tuning& tuning) {
  auto connector = TcpConnector::open(config, tuning);
  if (!connector) return connector.error();
  auto domain = TcpDomain::open(config.address, control, connector.value()->lingering(), tuning);
  if (!domain) return domain.error();
  return OpenedDomain{std::move(connector.value()), std::move(domain.value())};
}

}  // namespace kvc::tcp
