// The sim provider: create() is all that it exports.
#pragma once

#include "lane/domain.h"

namespace kvc::sim {

// Opens one sim domain. `control` outlives it.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::sim
