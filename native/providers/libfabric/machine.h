// Machine: the machine and the namespaces in which a process lives.
#pragma once

#include <cstdint>
#include <string>

namespace kvc::libfabric {

struct Machine {
  std::string boot_id;         // identifies the running kernel; empty: unknown, and equal to no other
  uint64_t processes = 0;      // the pid namespace: pids of another namespace mean nothing here
  uint64_t shared_memory = 0;  // the file system at /dev/shm

  // Returns this process's machine. Reads a few files.
  static Machine current();
  bool shares_processes(const Machine& other) const noexcept {
    return !boot_id.empty() && boot_id == other.boot_id && processes == other.processes;
  }
  bool shares_memory(const Machine& other) const noexcept {
    return shares_processes(other) && shared_memory == other.shared_memory;
  }
};

}  // namespace kvc::libfabric
