// The verbs provider: create() is all that it exports.
#pragma once

#include "lane/domain.h"

namespace kvc::verbs {

// Opens one port of one RDMA NIC, both halves; `control` outlives them. Blocks: opening libibverbs for the first time
// takes some milliseconds.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::verbs
