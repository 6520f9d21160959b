#include "providers/same_host/system.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/bounds.h"

#ifndef F_SEAL_FUTURE_WRITE  // Linux 5.1, but missing in the headers of some distributions that build wheels
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace kvc::same_host {

namespace {

Error plain_error(ErrorCode code, std::string_view operation, std::string message) {
  return Error{code, {}, {}, std::string(operation), std::move(message)};
}

}  // namespace

Error kernel_error(std::string_view operation, std::string_view what, int error_number) {
  Error error = system_error({}, operation, error_number);
  error.message = std::string(what) + ": " + error.message;
  // The process is out of descriptors or memory. A setting solves this, so the code is kResources.
  if (error_number == EMFILE || error_number == ENFILE || error_number == ENOMEM) error.code = ErrorCode::kResources;
  return error;
}

// --- Memory

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

namespace {

Result<Mapping> map_shared(int memfd, size_t bytes, int protection, std::string_view operation) {
  void* data = mmap(nullptr, bytes, protection, MAP_SHARED, memfd, 0);
  if (data == MAP_FAILED) return kernel_error(operation, "mmap of a memfd", errno);
  return Mapping(static_cast<std::byte*>(data), bytes);
}

}  // namespace

Result<SealedMemory> create_sealed_memory(const char* name, size_t bytes, Others others) {
  constexpr std::string_view kOperation = "create_sealed_memory";
  UniqueFd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return kernel_error(kOperation, "memfd_create", errno);
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return kernel_error(kOperation, "ftruncate", errno);
  Result<Mapping> mapping = map_shared(fd.get(), bytes, PROT_READ | PROT_WRITE, kOperation);
  if (!mapping) return mapping.error();
  // Our mapping from above stays writable under F_SEAL_FUTURE_WRITE. No process gets another writable mapping.
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | (others == Others::kRead ? F_SEAL_FUTURE_WRITE : 0) | F_SEAL_SEAL;
  if (fcntl(fd.get(), F_ADD_SEALS, seals) != 0) {
    return kernel_error(kOperation, "sealing a memfd (Linux 5.1 or later is needed)", errno);
  }
  return SealedMemory{std::move(fd), std::move(mapping.value())};
}

Status seal_against_shrinking(int memfd, uint64_t offset, uint64_t bytes) {
  constexpr std::string_view kOperation = "register_memory";
  if (fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    const int seals = fcntl(memfd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
      return plain_error(ErrorCode::kInvalidArgument, kOperation,
                         "the memfd cannot be sealed: create it with MFD_CLOEXEC | MFD_ALLOW_SEALING");
    }
  }
  struct stat status{};
  if (fstat(memfd, &status) != 0) return kernel_error(kOperation, "fstat of the memfd", errno);
  const auto size = static_cast<uint64_t>(status.st_size);
  if (!fits(offset, bytes, size)) {
    return plain_error(ErrorCode::kInvalidArgument, kOperation, "the region ends behind the end of its memfd");
  }
  return {};
}

Result<Mapping> map_peer_memory(int memfd, uint64_t bytes, Others access) {
  constexpr std::string_view kOperation = "map_peer_memory";
  const int seals = fcntl(memfd, F_GET_SEALS);
  struct stat status{};
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(memfd, &status) != 0 || bytes == 0 ||
      bytes > static_cast<uint64_t>(status.st_size)) {
    return plain_error(ErrorCode::kRefused, kOperation,
                       "the peer's memfd is too small, or not sealed against shrinking");
  }
  return map_shared(memfd, bytes, access == Others::kWrite ? PROT_READ | PROT_WRITE : PROT_READ, kOperation);
}

// --- Sockets

namespace {

// An abstract address: a zero byte and the name. The length marks the end.
struct AbstractAddress {
  explicit AbstractAddress(std::string_view name) {
    raw.sun_family = AF_UNIX;
    const size_t taken = std::min(name.size(), sizeof(raw.sun_path) - 1);
    std::memcpy(raw.sun_path + 1, name.data(), taken);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + taken);
  }
  const sockaddr* address() const { return reinterpret_cast<const sockaddr*>(&raw); }
  sockaddr_un raw{};
  socklen_t length = 0;
};

UniqueFd unix_socket() { return UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

}  // namespace

Result<UniqueFd> listen_on(std::string_view name) {
  UniqueFd listener = unix_socket();
  if (!listener) return kernel_error("open", "socket(AF_UNIX)", errno);
  const AbstractAddress address(name);
  if (bind(listener.get(), address.address(), address.length) != 0) return kernel_error("open", "bind", errno);
  if (listen(listener.get(), kMaxDials) != 0) return kernel_error("open", "listen", errno);
  return listener;
}

Result<UniqueFd> connect_to(std::string_view name) {
  UniqueFd connection = unix_socket();
  if (!connection) return kernel_error("accept", "socket(AF_UNIX)", errno);
  const AbstractAddress address(name);
  if (connect(connection.get(), address.address(), address.length) == 0) return connection;
  if (errno == EAGAIN) {
    return plain_error(ErrorCode::kResources, "accept", "the peer's queue of new connections is full: try again");
  }
  if (errno == ECONNREFUSED) {
    return plain_error(ErrorCode::kNotReachable, "accept",
                       "no process listens under the peer's name: the peer is gone, or in another network namespace");
  }
  return kernel_error("accept", "connect", errno);
}

Result<PeerProcess> peer_process(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return kernel_error("peer_process", "SO_PEERCRED", errno);
  }
  return PeerProcess{credentials.pid, credentials.uid};
}

Sent send_message(int socket, const Message& message, std::span<const int> descriptors) {
  iovec bytes{const_cast<Message*>(&message), sizeof(message)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &bytes;
  header.msg_iovlen = 1;
  if (!descriptors.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  }
  for (;;) {
    if (sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return Sent::kYes;
    if (errno == EINTR) continue;
    // ETOOMANYREFS: this user has more descriptors in flight to peers than it may have open.
    const bool later = errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM || errno == ETOOMANYREFS;
    return later ? Sent::kLater : Sent::kBroken;
  }
}

Received receive_message(int socket, Message& message, std::array<UniqueFd, kMaxDescriptors>& descriptors) {
  iovec bytes{&message, sizeof(message)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &bytes;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  ssize_t length = 0;
  do {
    length = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (length < 0 && errno == EINTR);
  if (length < 0 && errno == EAGAIN) return Received::kNothing;
  if (length <= 0) return Received::kClosed;
  // Takes all received descriptors first, so that they are closed in every case.
  size_t taken = 0;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = CMSG_LEN(0); at + sizeof(int) <= part->cmsg_len; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, reinterpret_cast<const char*>(part) + at, sizeof(fd));
      UniqueFd owned(fd);
      if (taken < kMaxDescriptors) descriptors[taken++] = std::move(owned);
    }
  }
  const bool whole = (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
  return whole && length == sizeof(message) ? Received::kMessage : Received::kMalformed;
}

}  // namespace kvc::same_host
