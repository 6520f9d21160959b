#include "providers/verbs/provider.h"

#include "providers/verbs/connector.h"

namespace kvc::verbs {

Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control) {
  Result<const Library*> library = Library::load();
  if (!library) return library.error();
  return VerbsConnector::open(config, control, *library.value(), Tuning{});
}

}  // namespace kvc::verbs
