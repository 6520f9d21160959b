#include "providers/nvlink/provider.h"

#include <utility>

#include "providers/nvlink/connector.h"
#include "providers/nvlink/domain.h"

namespace kvc::nvlink {

Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control) {
  auto connector = std::make_unique<NvlinkConnector>(config);
  if (Status opened = connector->open(); !opened) return opened.error();
  auto domain = std::make_unique<NvlinkDomain>(connector->board(), connector->driver(), control);
  if (Status opened = domain->open(); !opened) return opened.error();
  return OpenedDomain{std::move(connector), std::move(domain)};
}

}  // namespace kvc::nvlink
