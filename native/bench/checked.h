// Results of the engine's calls in a benchmark: a failure is an exception, and so is one that does not come.
#pragma once

#include <chrono>
#include <stdexcept>
#include <utility>

#include "base/error.h"

namespace kvc::bench {

// What is waited for takes milliseconds at most: after this long something is broken.
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
