#include "providers/libfabric/machine.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

namespace kvc::libfabric {

Machine Machine::current() {
  Machine machine;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> machine.boot_id;
  struct stat status{};
  if (::stat("/proc/self/ns/pid", &status) == 0) machine.processes = status.st_ino;
  if (::stat("/dev/shm", &status) == 0) machine.shared_memory = status.st_dev;
  return machine;
}

UniqueFd open_pidfd(pid_t pid) { return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))); }

bool is_gone(const UniqueFd& pidfd) {
  if (!pidfd) return false;
  pollfd ready{pidfd.get(), POLLIN, 0};
  return ::poll(&ready, 1, 0) == 1;
}

Result<uint64_t> random_key() {
  uint64_t key = 0;
  while (key == 0) {
    // 256 bytes or less come whole, once the kernel's generator is seeded (getrandom(2)).
    if (::getrandom(&key, sizeof(key), 0) != sizeof(key) && errno != EINTR) {
      return system_error("libfabric", "getrandom", errno);
    }
  }
  return key;
}

}  // namespace kvc::libfabric
