// The sim provider: create() is all that it exports.
#pragma once

#include <memory>

#include "engine/domain.h"

namespace kvc::sim {

// Opens one sim domain. Called on the worker thread; `sink` outlives the domain.
Result<std::unique_ptr<Domain>> create(const DomainConfig& config, DomainSink& sink);

}  // namespace kvc::sim
