#include "providers/shuffle/provider.h"

#include <memory>
#include <utility>

#include "providers/shuffle/connector.h"
#include "providers/shuffle/domain.h"

namespace kvc::shuffle {

Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control) {
  const DomainConfig inner = carrier_of(config);
  if (inner.provider == "shuffle") {
    return Error{ErrorCode::kInvalidArgument, "shuffle", {}, "open", "shuffled once is shuffled"};
  }
  Result<OpenedDomain> opened = renamed(open_domain(inner, control));
  if (!opened) return opened;
  Result<std::unique_ptr<ShuffleDomain>> domain = ShuffleDomain::open(config, std::move(opened.value().domain));
  if (!domain) return domain.error();
  return OpenedDomain{std::make_unique<ShuffleConnector>(std::move(opened.value().connector)),
                      std::move(domain.value())};
}

}  // namespace kvc::shuffle
