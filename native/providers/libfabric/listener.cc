#include "providers/libfabric/listener.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "base/unique_fd.h"

namespace kvc::libfabric {
namespace {

bool listens(int fd) {
  int value = 0;
  socklen_t length = sizeof(value);
  return ::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &value, &length) == 0 && value != 0;
}

// Whether the connection has received no byte. Also true if the kernel does not count (before Linux 4.1): all
// connections are closed then, which happens next in any case.
bool is_silent(int fd) {
  std::array<uint64_t, 17> info{};  // the kernel's tcp_info up to tcpi_bytes_received; the C library's is shorter
  socklen_t length = sizeof(info);
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, info.data(), &length) != 0 || info.back() == 0;
}

}  // namespace

bool Listener::is_ours(int fd) const {
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0 && length == address_.size() &&
         std::memcmp(&own, address_.data(), length) == 0;
}

template <typename Visit>
size_t Listener::for_each_socket(Visit&& visit) const {
  size_t descriptors = 0;
  std::error_code failed;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", failed), end; !failed && entry != end;
       entry.increment(failed)) {
    ++descriptors;
    const std::string name = entry->path().filename();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    if (!is_ours(fd)) continue;
    // Another thread may close the descriptor, and its number may be used again. So the check is repeated on our own
    // copy.
    const UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (is_ours(copy.get())) visit(copy.get());
  }
  return descriptors;
}

void Listener::stop() const {
  for_each_socket([](int fd) {
    if (listens(fd)) ::shutdown(fd, SHUT_RDWR);
  });
}

size_t Listener::hang_up_on_the_silent() const {
  return for_each_socket([](int fd) {
    if (!listens(fd) && is_silent(fd)) ::shutdown(fd, SHUT_RDWR);
  });
}

}  // namespace kvc::libfabric
