#include "base/ready_fd.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace kvc {

Status ReadyFd::open() {
  fd_ = UniqueFd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!fd_) return system_error({}, "eventfd", errno);
  return {};
}

int ReadyFd::fd(bool ready) {
  used_ = true;
  update(ready);
  return fd_.get();
}

void ReadyFd::update(bool ready) {
  if (!used_ || ready == readable_) return;
  uint64_t count = 1;
  if (ready) {
    readable_ = write(fd_.get(), &count, sizeof(count)) == sizeof(count);
  } else {
    readable_ = read(fd_.get(), &count, sizeof(count)) != sizeof(count);
  }
}

}  // namespace kvc
