// Bytes: a buffer that peers exchange, as a value.
#pragma once

#include <cstddef>
#include <vector>

namespace kvc {

using Bytes = std::vector<std::byte>;

}  // namespace kvc
