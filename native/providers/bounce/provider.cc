#include "providers/bounce/provider.h"

#include <utility>

#include "providers/bounce/connector.h"
#include "providers/bounce/domain.h"
#include "providers/bounce/errors.h"

namespace kvc::bounce {

Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control) {
  const DomainConfig below = carrier_of(config);
  if (below.provider == "bounce" || below.provider == "nvlink") {
    return bounce_error(ErrorCode::kInvalidArgument, "open",
                        "the lane below has to move host memory: tcp, host, verbs or libfabric, not " + below.provider);
  }
  Result<OpenedDomain> opened = renamed(open_domain(below, control));
  if (!opened) return opened;
  auto connector = BounceConnector::open(config, std::move(opened.value().connector));
  if (!connector) return connector.error();
  auto domain = std::make_unique<BounceDomain>(std::move(opened.value().domain), connector.value()->pool(), control);
  return OpenedDomain{std::move(connector.value()), std::move(domain)};
}

}  // namespace kvc::bounce
