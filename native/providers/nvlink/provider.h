// The nvlink provider: create() is all that it exports.
#pragma once

#include "lane/domain.h"

namespace kvc::nvlink {

Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::nvlink
