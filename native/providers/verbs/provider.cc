#include "providers/verbs/provider.h"

#include "providers/verbs/domain.h"

namespace kvc::verbs {

Result<std::unique_ptr<Domain>> create(const DomainConfig& config, DomainSink& sink) {
  Result<const Library*> library = Library::load();
  if (!library) return library.error();
  auto domain = VerbsDomain::open(config, sink, *library.value(), Tuning{});
  if (!domain) return domain.error();
  return std::unique_ptr<Domain>(std::move(domain.value()));
}

}  // namespace kvc::verbs
