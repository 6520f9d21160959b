#include "providers/libfabric/machine.h"

#include <sys/stat.h>

#include "base/process.h"

namespace kvc::libfabric {

Machine Machine::current() {
  Machine machine;
  machine.boot_id = kvc::boot_id();
  machine.processes = own_namespace("pid");
  struct stat status{};
  if (::stat("/dev/shm", &status) == 0) machine.shared_memory = status.st_dev;
  return machine;
}

}  // namespace kvc::libfabric
