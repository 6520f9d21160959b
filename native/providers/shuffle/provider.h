// The shuffle provider: create() is all that it exports.
#pragma once

#include "lane/domain.h"

namespace kvc::shuffle {

// Opens a domain of another provider and puts everything that goes through it out of order: a stand-in for a fabric
// like EFA's, for tests. config.device is PROVIDER[:DEVICE] of the domain inside ("libfabric:tcp"; empty: "tcp");
// config.seed and config.max_delay_us decide the order, every other field is the inner domain's.
// `control` outlives it.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::shuffle
