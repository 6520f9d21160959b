// Other processes of this machine: whether one is still alive, and which machine this is.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "base/unique_fd.h"

namespace kvc {

// Any thread; nothing here blocks.

// Readable once the process is gone with all its threads. None for this process, which outlives all that it has, for 0,
// and where the kernel gives none (another pid namespace).
UniqueFd open_pidfd(pid_t pid);
// False where `pidfd` is none.
bool is_gone(const UniqueFd& pidfd);

// The running kernel, since it was booted (/proc/sys/kernel/random/boot_id); empty if unknown.
std::string boot_id();

// The number of this process's namespace of that kind ("pid", "user"), unique under one running kernel; 0: unknown.
uint64_t own_namespace(std::string_view kind);

}  // namespace kvc
