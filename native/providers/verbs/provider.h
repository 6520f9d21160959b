// The verbs provider. It exports create() only.
#pragma once

#include "lane/domain.h"

namespace kvc::verbs {

// Opens both halves on one port of one RDMA NIC. `control` outlives them. Blocks: opening libibverbs for the first time
// takes some milliseconds.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::verbs
