#include "providers/bounce/provider.h"

#include <utility>

#include "providers/bounce/connector.h"
#include "providers/bounce/domain.h"
#include "providers/bounce/errors.h"

namespace kvc::bounce {

Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control) {
  DomainConfig below = config;
  const size_t colon = config.device.find(':');
  below.provider = config.device.empty() ? "tcp" : config.device.substr(0, colon);
  below.device = colon == std::string::npos ? "" : config.device.substr(colon + 1);
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
