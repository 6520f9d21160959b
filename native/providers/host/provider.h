// The host provider. It exports create() only.
#pragma once

#include "lane/domain.h"

namespace kvc::host {

// Opens one host domain. `control` outlives it. Blocks.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::host
