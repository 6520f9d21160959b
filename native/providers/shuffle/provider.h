// The shuffle provider. It exports create() only.
#pragma once

#include "lane/domain.h"

namespace kvc::shuffle {

// Opens a domain of another provider and changes the order of everything that goes through it: a stand-in for a fabric
// like EFA's, for tests. config.device is PROVIDER[:DEVICE] of the inner domain ("libfabric:tcp"; empty: "tcp").
// config.seed and config.max_delay_us decide the order. All other fields are the inner domain's. `control` outlives the
// domain.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::shuffle
