#include "bench/memory_copy.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

namespace kvc::bench {

void copy_pages(const PageList& target, const PageList& source) {
  for (size_t i = 0; i < source.slots.size(); ++i) std::memcpy(target.page(i), source.page(i), source.page_bytes);
}

void write_pages_to_process(pid_t pid, const PageList& target, const PageList& source, size_t pages_per_call) {
  std::vector<iovec> local(pages_per_call);
  std::vector<iovec> remote(pages_per_call);
  const size_t n = source.slots.size();
  for (size_t first = 0; first < n; first += pages_per_call) {
    const size_t count = std::min(pages_per_call, n - first);
    for (size_t i = 0; i < count; ++i) {
      local[i] = {source.page(first + i), source.page_bytes};
      remote[i] = {target.page(first + i), source.page_bytes};
    }
    // The kernel writes less only if a page is not mapped, or at 2 GiB a call. Both are mistakes of the caller.
    const ssize_t written = ::process_vm_writev(pid, local.data(), count, remote.data(), count, 0);
    if (written < 0) throw std::system_error(errno, std::system_category(), "process_vm_writev");
    if (static_cast<uint64_t>(written) != count * source.page_bytes) {
      throw std::system_error(EFAULT, std::system_category(), "process_vm_writev wrote less than asked");
    }
  }
}

}  // namespace kvc::bench
