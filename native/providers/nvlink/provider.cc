#include "providers/nvlink/provider.h"

#include "providers/nvlink/domain.h"

namespace kvc::nvlink {

Result<std::unique_ptr<Domain>> create(const DomainConfig& config, DomainSink& sink) {
  auto domain = std::make_unique<NvlinkDomain>(config, sink);
  if (Status opened = domain->open(); !opened) return opened.error();
  return std::unique_ptr<Domain>(std::move(domain));
}

}  // namespace kvc::nvlink
