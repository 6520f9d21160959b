#include "providers/host/provider.h"

#include "providers/host/domain.h"

namespace kvc::host {

Result<std::unique_ptr<Domain>> create(const DomainConfig&, DomainSink& sink) {
  auto domain = std::make_unique<HostDomain>(sink);
  if (Status opened = domain->open(); !opened) return opened.error();
  return std::unique_ptr<Domain>(std::move(domain));
}

}  // namespace kvc::host
