// Machine: which machine and namespaces a process lives in, and whether another process there is still alive.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "engine/error.h"
#include "engine/unique_fd.h"

namespace kvc::libfabric {

struct Machine {
  std::string boot_id;         // the kernel, since it was booted; empty: unknown, and equal to nobody's
  uint64_t processes = 0;      // the pid namespace: pids of another one mean nothing here
  uint64_t shared_memory = 0;  // the file system at /dev/shm

  static Machine current();
  bool shares_processes(const Machine& other) const noexcept {
    return !boot_id.empty() && boot_id == other.boot_id && processes == other.processes;
  }
  bool shares_memory(const Machine& other) const noexcept {
    return shares_processes(other) && shared_memory == other.shared_memory;
  }
};

// Readable once the process is gone; none where the kernel has none to give.
UniqueFd open_pidfd(pid_t pid);
bool is_gone(const UniqueFd& pidfd);

// 64 random bits, never 0.
Result<uint64_t> random_key();

}  // namespace kvc::libfabric
