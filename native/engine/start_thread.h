// start_thread(): a thread, or an error where the system gives none.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace kvc {

// Runs `f` on `thread`, which is none so far. kResources where no thread can be made: std::thread's constructor throws then,
// and nothing of the engine may. After a failure `f` never runs.
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
