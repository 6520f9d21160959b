// bounce: memory that the lane below cannot reach, through host memory of both ends (domain.h).
#pragma once

#include <memory>

#include "engine/domain.h"

namespace kvc::bounce {

// `config.device` names the lane below, as PROVIDER[:DEVICE]; empty: tcp.
Result<std::unique_ptr<Domain>> create(const DomainConfig& config, DomainSink& sink);

}  // namespace kvc::bounce
