// The nvlink provider. It exports create() only.
#pragma once

#include "lane/domain.h"

namespace kvc::nvlink {

Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::nvlink
