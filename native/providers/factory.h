// The table of providers. The other calls of factory.cc are declared in lane/domain.h: open_domain() and
// load_libraries().
#pragma once

#include <span>
#include <string_view>

namespace kvc {

// Returns the names of the providers compiled into this library, the fastest first.
std::span<const std::string_view> provider_names() noexcept;

}  // namespace kvc
