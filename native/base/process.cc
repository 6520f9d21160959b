#include "base/process.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>

#ifndef SYS_pidfd_open  // Linux 5.3, but missing in the headers of some distributions that build wheels
#define SYS_pidfd_open 434
#endif

namespace kvc {

UniqueFd open_pidfd(pid_t pid) {
  if (pid == 0 || pid == getpid()) return {};
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

bool is_gone(const UniqueFd& pidfd) {
  pollfd entry{pidfd.get(), POLLIN, 0};
  return pidfd && poll(&entry, 1, 0) == 1;
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

uint64_t own_namespace(std::string_view kind) {
  struct stat status{};
  return stat(("/proc/self/ns/" + std::string(kind)).c_str(), &status) == 0 ? status.st_ino : 0;
}

}  // namespace kvc
