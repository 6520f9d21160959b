// Timeout: how long a call may block.
#pragma once

#include <chrono>

namespace kvc {

using Timeout = std::chrono::microseconds;

}  // namespace kvc
