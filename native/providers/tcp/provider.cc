#include "providers/tcp/provider.h"

#include "providers/tcp/domain.h"

namespace kvc::tcp {

Result<std::unique_ptr<Domain>> create(const DomainConfig& config, DomainSink& sink) {
  auto domain = TcpDomain::open(config, sink, Tuning{});
  if (!domain) return domain.error();
  return std::unique_ptr<Domain>(std::move(domain.value()));
}

}  // namespace kvc::tcp
