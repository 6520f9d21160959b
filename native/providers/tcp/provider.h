// The tcp provider: create() is all that the engine needs of it.
#pragma once

#include "lane/domain.h"
#include "providers/tcp/tuning.h"

namespace kvc::tcp {

// Opens both halves of one tcp domain; `control` outlives them.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);
// The same with numbers of the caller's: tests.
Result<OpenedDomain> open(const DomainConfig& config, ControlQueue& control, const Tuning& tuning);

}  // namespace kvc::tcp
