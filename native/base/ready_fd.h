// ReadyFd: a descriptor that is readable while items wait, for threads that sleep in poll() or an event loop.
#pragma once

#include "base/error.h"
#include "base/unique_fd.h"

namespace kvc {

// The owner guards this object with the lock of the items.
class ReadyFd {
 public:
  Status open();
  // Returns the descriptor and sets its state. update() is a no-op before the first call, so that an unused descriptor
  // costs no system calls.
  int fd(bool ready);
  // Sets whether items wait. Costs one write when the first item arrives and one read when the last has gone, not one
  // per item.
  void update(bool ready);

 private:
  UniqueFd fd_;
  bool used_ = false;
  bool readable_ = false;
};

}  // namespace kvc
