// The results of the transfer engine's calls in a benchmark. A failed call throws an exception, and so does an event
// that does not arrive.
#pragma once

#include <chrono>
#include <stdexcept>
#include <utility>

#include "base/error.h"

namespace kvc::bench {

// Awaited events take milliseconds at most. After this long something is broken.
inline constexpr auto kPatience = std::chrono::seconds(30);

template <typename T>
T checked(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.error().to_string());
  return std::move(result.value());
}

inline void checked(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.error().to_string());
}

}  // namespace kvc::bench
