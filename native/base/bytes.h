// Bytes: what peers hand each other, as a value.
#pragma once

#include <cstddef>
#include <vector>

namespace kvc {

using Bytes = std::vector<std::byte>;

}  // namespace kvc
