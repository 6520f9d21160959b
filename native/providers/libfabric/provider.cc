#include "providers/libfabric/provider.h"

#if KVC_HAVE_LIBFABRIC
#include "providers/libfabric/domain.h"
#include "providers/libfabric/library.h"
#endif

namespace kvc::libfabric {

void load() {
#if KVC_HAVE_LIBFABRIC
  (void)library();  // create() reports a failure
#endif
}

Result<OpenedDomain> create([[maybe_unused]] const DomainConfig& config, [[maybe_unused]] ControlQueue& control) {
#if KVC_HAVE_LIBFABRIC
  return open(config, control);
#else
  return Error{ErrorCode::kRefused,
               "libfabric",
               {},
               "open",
               "this build of kv-connector lacks the libfabric lane, because rdma/fabric.h was missing when it was "
               "compiled: install libfabric-dev and build again"};
#endif
}

}  // namespace kvc::libfabric
