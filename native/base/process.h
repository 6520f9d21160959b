// Queries about processes and the machine: whether a process is alive, and which machine this is.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "base/unique_fd.h"

namespace kvc {

// Every function here may be called by any thread and does not block.

// A descriptor that is readable once the process and all its threads are gone. Empty for this process (which outlives
// its own objects), for pid 0, and if the kernel refuses (another pid namespace).
UniqueFd open_pidfd(pid_t pid);
// Whether the process of `pidfd` is gone. False for an empty `pidfd`.
bool is_gone(const UniqueFd& pidfd);

// Id of the running kernel since its boot (/proc/sys/kernel/random/boot_id). Empty if unknown.
std::string boot_id();

// Number of this process's namespace of the given kind ("pid", "user"), unique under one running kernel. 0 if unknown.
uint64_t own_namespace(std::string_view kind);

}  // namespace kvc
