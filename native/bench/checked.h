// Results of the engine's calls in a benchmark: a failure is an exception.
#pragma once

#include <stdexcept>
#include <utility>

#include "engine/error.h"

namespace kvc::bench {

template <typename T>
T checked(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.error().to_string());
  return std::move(result.value());
}

inline void checked(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.error().to_string());
}

}  // namespace kvc::bench
