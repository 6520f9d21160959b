// start_thread(): starts a thread, or returns an error if the system refuses.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace kvc {

// Runs `f` on `thread`, which must be empty. Returns kResources if no thread can be started: the constructor of
// std::thread throws, and no transfer engine code may throw. After a failure `f` never runs.
template <typename F>
Status start_thread(std::thread& thread, F&& f) {
  try {
    thread = std::thread(std::forward<F>(f));
  } catch (const std::system_error& error) {
    return Error{ErrorCode::kResources,
                 {},
                 {},
                 "create",
                 std::string("cannot start a thread (") + error.what() +
                     "): raise the process limit (ulimit -u, or pids.max of the container)"};
  }
  return {};
}

}  // namespace kvc
