// How the bounce lane reports errors: its own, and in its name those of the lane below and of the CUDA driver.
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
