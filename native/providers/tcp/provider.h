// The tcp provider. The transfer engine calls create() only.
#pragma once

#include "lane/domain.h"
#include "providers/tcp/tuning.h"

namespace kvc::tcp {

// Opens both halves of one tcp domain. `control` outlives them.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);
// As create(), with the caller's numbers. For tests.
Result<OpenedDomain> open(const DomainConfig& config, ControlQueue& control, const Tuning& tuning);

}  // namespace kvc::tcp
