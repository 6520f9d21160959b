// The bounce provider: for memory that the lower lane cannot reach, it goes through host memory at both ends
// (domain.h).
#pragma once

#include "lane/domain.h"

namespace kvc::bounce {

// Opens both halves. `config.device` names the lower lane, as PROVIDER[:DEVICE]; empty: tcp. `control` outlives them.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::bounce
