// bounce: memory that the lane below cannot reach, through host memory of both ends (domain.h).
#pragma once

#include "lane/domain.h"

namespace kvc::bounce {

// `config.device` names the lane below, as PROVIDER[:DEVICE]; empty: tcp.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::bounce
