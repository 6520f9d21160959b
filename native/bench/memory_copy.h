// The operating system's own ways to move pages between memories of one machine: the yardsticks of the host provider.
//
// Errors are exceptions (std::system_error): nothing else runs in a benchmark process that they could disturb.
#pragma once

#include <sys/types.h>

#include "bench/page_lists.h"

namespace kvc::bench {

// Copies with one memcpy per page, within this process, on the calling thread.
void copy_pages(const PageList& target, const PageList& source);

// Writes pages into the memory of process `pid` (`target.base` is an address there), on the calling thread. Each
// process_vm_writev writes `pages_per_call` pages.
void write_pages_to_process(pid_t pid, const PageList& target, const PageList& source, size_t pages_per_call);

}  // namespace kvc::bench
