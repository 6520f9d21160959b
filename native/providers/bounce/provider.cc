#include "providers/bounce/provider.h"

#include "providers/bounce/domain.h"

namespace kvc::bounce {

Result<std::unique_ptr<Domain>> create(const DomainConfig& config, DomainSink& sink) {
  auto domain = BounceDomain::open(config, sink);
  if (!domain) return domain.error();
  return std::unique_ptr<Domain>(std::move(domain.value()));
}

}  // namespace kvc::bounce
