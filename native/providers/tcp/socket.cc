#include "providers/tcp/socket.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>

#include "providers/tcp/wire.h"

namespace kvc::tcp {
namespace {

// A dead host answers nothing. The control plane's heartbeats notice first (seconds) and fence the link. These options
// serve a link whose control plane is gone as well. Data in flight: the kernel gives up after 20 s without an
// acknowledgement, while its default is a quarter of an hour. Nothing in flight: it probes after 10 s of silence and
// then every 5 s. The third unanswered probe ends the connection, 25 s after the last bytes.
constexpr int kUserTimeoutMs = 20'000;
constexpr int kKeepIdleS = 10;
constexpr int kKeepIntervalS = 5;
constexpr int kKeepCount = 3;
// New connections that the kernel holds for us between two polls. The kernel caps the number at net.core.somaxconn.
constexpr int kBacklog = 1024;

struct FreeInterfaces {
  void operator()(ifaddrs* interfaces) const noexcept { ::freeifaddrs(interfaces); }
};
struct FreeAddress {
  void operator()(addrinfo* info) const noexcept { ::freeaddrinfo(info); }
};
using Address = std::unique_ptr<addrinfo, FreeAddress>;

Error socket_error(std::string_view operation, const std::string& what, int error_number) {
  Error error = system_error("tcp", operation, error_number);
  error.message = what + ": " + error.message;
  return error;
}

Result<Address> parse(const std::string& address, uint16_t port, std::string_view operation) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int rc = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found); rc != 0) {
    return tcp_error(ErrorCode::kInvalidArgument, operation,
                     "'" + printable(address) + "' is not a numeric IP address: give an address of this machine");
  }
  return Address(found);
}

bool same_host(const sockaddr& left, const sockaddr& right) {
  if (left.sa_family != right.sa_family) return false;
  if (left.sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(left).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(right).sin_addr.s_addr;
  }
  return left.sa_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6&>(left).sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(right).sin6_addr, sizeof(in6_addr)) == 0;
}

bool is_wildcard(const addrinfo& info) {
  if (info.ai_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(info.ai_addr)->sin_addr.s_addr == htonl(INADDR_ANY);
  }
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(info.ai_addr)->sin6_addr);
}

bool set(const UniqueFd& socket, int level, int option, int value) {
  return ::setsockopt(socket.get(), level, option, &value, sizeof(value)) == 0;
}

Result<UniqueFd> open_socket(const addrinfo& info, std::string_view operation, const Tuning& tuning) {
  UniqueFd socket(::socket(info.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return socket_error(operation, "socket", errno);
  // Accepted sockets inherit all of these from their listener.
  const bool done =
      set(socket, IPPROTO_TCP, TCP_NODELAY, 1) && set(socket, SOL_SOCKET, SO_KEEPALIVE, 1) &&
      set(socket, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleS) && set(socket, IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalS) &&
      set(socket, IPPROTO_TCP, TCP_KEEPCNT, kKeepCount) && set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs) &&
      (tuning.socket_buffer == 0 || (set(socket, SOL_SOCKET, SO_SNDBUF, tuning.socket_buffer) &&
                                     set(socket, SOL_SOCKET, SO_RCVBUF, tuning.socket_buffer)));
  if (!done) return socket_error(operation, "setsockopt", errno);
  return socket;
}

}  // namespace

Result<UniqueFd> listen_on(const std::string& address, const Tuning& tuning) {
  Result<Address> local = parse(address, 0, "listen");
  if (!local) return local.error();
  if (is_wildcard(*local.value())) {
    return tcp_error(
        ErrorCode::kInvalidArgument, "listen",
        "'" + address + "' stands for every network of this machine: give the one address that peers reach");
  }
  Result<UniqueFd> socket = open_socket(*local.value(), "listen", tuning);
  if (!socket) return socket;
  if (::bind(socket.value().get(), local.value()->ai_addr, local.value()->ai_addrlen) != 0) {
    return socket_error("listen", "bind to " + address, errno);
  }
  if (::listen(socket.value().get(), kBacklog) != 0) return socket_error("listen", "listen on " + address, errno);
  return socket;
}

Result<UniqueFd> dial(const std::string& local, const std::string& address, uint16_t port, const Tuning& tuning) {
  Result<Address> from = parse(local, 0, "connect");
  if (!from) return from.error();
  Result<Address> to = parse(address, port, "connect");
  if (!to) return to.error();
  Result<UniqueFd> socket = open_socket(*to.value(), "connect", tuning);
  if (!socket) return socket;
  // Binds to the configured local address, so that the bytes take the network that was chosen for this domain.
  const std::string what = endpoint(address, port) + " from " + local;
  // Lets connect() choose the port: a port that bind() reserves is not shared between destinations. On a kernel without
  // this option fewer ports are available, nothing else changes.
  (void)set(socket.value(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
  if (::bind(socket.value().get(), from.value()->ai_addr, from.value()->ai_addrlen) != 0 ||
      (::connect(socket.value().get(), to.value()->ai_addr, to.value()->ai_addrlen) != 0 && errno != EINPROGRESS)) {
    return socket_error("connect", what, errno);
  }
  return socket;
}

std::string endpoint(const std::string& address, uint16_t port) {
  const bool v6 = address.find(':') != std::string::npos;
  return (v6 ? "[" + address + "]" : address) + ":" + std::to_string(port);
}

Result<uint16_t> local_port(const UniqueFd& socket) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&name), &length) != 0) {
    return system_error("tcp", "getsockname", errno);
  }
  return ntohs(name.ss_family == AF_INET ? reinterpret_cast<const sockaddr_in*>(&name)->sin_port
                                         : reinterpret_cast<const sockaddr_in6*>(&name)->sin6_port);
}

int take_error(const UniqueFd& socket) {
  int error_number = 0;
  socklen_t length = sizeof(error_number);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error_number, &length) != 0) return errno;
  return error_number;
}

bool more_waits(const UniqueFd& socket) {
  int bytes = 0;
  return ::ioctl(socket.get(), FIONREAD, &bytes) == 0 && bytes > 0;
}

void hang_up(UniqueFd& socket) {
  const linger now{1, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  ::shutdown(socket.get(), SHUT_RDWR);
  socket.reset();
}

Result<Epoll> Epoll::create() {
  UniqueFd fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!fd) return system_error("tcp", "epoll_create1", errno);
  return Epoll(std::move(fd));
}

Status Epoll::control(int operation, int target, uint32_t events, Watched& watched) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = &watched;
  if (::epoll_ctl(fd_.get(), operation, target, &event) != 0) return system_error("tcp", "epoll_ctl", errno);
  return {};
}

Status Epoll::add(int target, uint32_t events, Watched& watched) {
  return control(EPOLL_CTL_ADD, target, events, watched);
}

Status Epoll::modify(int target, uint32_t events, Watched& watched) {
  return control(EPOLL_CTL_MOD, target, events, watched);
}

void Epoll::remove(int target) noexcept { ::epoll_ctl(fd_.get(), EPOLL_CTL_DEL, target, nullptr); }

std::span<epoll_event> Epoll::ready(std::span<epoll_event> room) const noexcept {
  const int count = ::epoll_wait(fd_.get(), room.data(), static_cast<int>(room.size()), 0);
  return room.first(count > 0 ? static_cast<size_t>(count) : 0);
}

uint64_t interface_speed(const std::string& address) {
  const Result<Address> wanted = parse(address, 0, "open");
  ifaddrs* list = nullptr;
  if (!wanted || ::getifaddrs(&list) != 0) return 0;
  const std::unique_ptr<ifaddrs, FreeInterfaces> interfaces(list);
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || !same_host(*one->ifa_addr, *wanted.value()->ai_addr)) continue;
    // In megabits. If the driver does not know the speed (loopback, a link that is down), it is -1 or reading fails.
    int64_t megabits = 0;
    std::ifstream("/sys/class/net/" + std::string(one->ifa_name) + "/speed") >> megabits;
    return megabits > 0 ? static_cast<uint64_t>(megabits) * 1'000'000 : 0;
  }
  return 0;
}

}  // namespace kvc::tcp
