// The sim provider. It exports create() only.
#pragma once

#include "lane/domain.h"

namespace kvc::sim {

// Opens one sim domain. `control` outlives it.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::sim
