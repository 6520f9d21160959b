#include "providers/shuffle/provider.h"

#include "providers/shuffle/domain.h"

namespace kvc::shuffle {

Result<std::unique_ptr<Domain>> create(const DomainConfig& config, DomainSink& sink) {
  auto domain = ShuffleDomain::open(config, sink);
  if (!domain) return domain.error();
  return std::unique_ptr<Domain>(std::move(domain.value()));
}

}  // namespace kvc::shuffle
