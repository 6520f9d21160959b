// The verbs provider: create() is all that it exports.
#pragma once

#include <memory>

#include "engine/domain.h"

namespace kvc::verbs {

// Opens one port of one RDMA NIC. Called on the worker thread; `sink` outlives the domain. Opening libibverbs for the
// first time takes some milliseconds.
Result<std::unique_ptr<Domain>> create(const DomainConfig& config, DomainSink& sink);

}  // namespace kvc::verbs
