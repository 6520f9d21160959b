// The table of providers. The factory's other calls are declared in lane/domain.h: open_domain() and load_libraries().
#pragma once

#include <span>
#include <string_view>

namespace kvc {

// The providers compiled into this library, fastest first.
std::span<const std::string_view> provider_names() noexcept;

}  // namespace kvc
