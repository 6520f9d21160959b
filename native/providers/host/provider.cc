#include "providers/host/provider.h"

#include <memory>

#include "providers/host/connector.h"
#include "providers/host/domain.h"

namespace kvc::host {

Result<OpenedDomain> create(const DomainConfig&, ControlQueue& control) {
  auto connector = std::make_unique<HostConnector>();
  if (Status opened = connector->open(); !opened) return opened.error();
  auto domain = std::make_unique<HostDomain>(connector->board(), control);
  if (Status opened = domain->open(); !opened) return opened.error();
  return OpenedDomain{std::move(connector), std::move(domain)};
}

}  // namespace kvc::host
