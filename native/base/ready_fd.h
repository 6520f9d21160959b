// ReadyFd: a descriptor that is readable while something waits, for whoever sleeps in poll() or an event loop.
#pragma once

#include "base/error.h"
#include "base/unique_fd.h"

namespace kvc {

// Its owner guards it with the lock of what it stands for.
class ReadyFd {
 public:
  Status open();
  // Kept up to date from the first call on: an engine whose owner never asks makes no system call an event.
  int fd(bool ready);
  // One write when the first thing comes and one read when the last has gone: not one for each.
  void update(bool ready);

 private:
  UniqueFd fd_;
  bool used_ = false;
  bool readable_ = false;
};

}  // namespace kvc
