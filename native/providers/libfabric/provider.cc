#include "providers/libfabric/provider.h"

#if KVC_HAVE_LIBFABRIC
#include "providers/libfabric/domain.h"
#endif

namespace kvc::libfabric {

Result<std::unique_ptr<Domain>> create([[maybe_unused]] const DomainConfig& config, [[maybe_unused]] DomainSink& sink) {
#if KVC_HAVE_LIBFABRIC
  auto domain = LibfabricDomain::open(config, sink);
  if (!domain) return domain.error();
  return std::unique_ptr<Domain>(std::move(domain.value()));
#else
  return Error{ErrorCode::kRefused,
               "libfabric",
               {},
               "open",
               "this build of kv-connector knows nothing of libfabric, because rdma/fabric.h was missing when it was "
               "compiled: install libfabric-dev and build again"};
#endif
}

}  // namespace kvc::libfabric
