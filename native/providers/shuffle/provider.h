// The shuffle provider: create() is all that it exports.
#pragma once

#include <memory>

#include "engine/domain.h"

namespace kvc::shuffle {

// Opens a domain of another provider and puts everything that goes through it out of order: a stand-in for a fabric
// like EFA's, for tests. config.device is PROVIDER[:DEVICE] of the domain inside ("libfabric:tcp"; empty: "tcp");
// config.seed and config.max_delay_us decide the order, every other field is the inner domain's.
// Called on the worker thread; `sink` outlives the domain.
Result<std::unique_ptr<Domain>> create(const DomainConfig& config, DomainSink& sink);

}  // namespace kvc::shuffle
