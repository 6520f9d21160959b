// Errors of the bounce lane: its own, and in its name the errors of the lower lane and of the CUDA driver.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace kvc::bounce {

inline Error bounce_error(ErrorCode code, std::string_view operation, std::string message) {
  return Error{code, "bounce", {}, std::string(operation), std::move(message)};
}

inline Error renamed(Error error) {
  error.provider = "bounce";
  return error;
}
template <typename T>
Result<T> renamed(Result<T> result) {
  if (!result) result.error().provider = "bounce";
  return result;
}

}  // namespace kvc::bounce
