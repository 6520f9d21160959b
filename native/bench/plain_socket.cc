#include "bench/plain_socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

namespace kvc::bench {
namespace {

// The kinds of an initiator's request. kPages: `count` slots follow, then as many pages; the target answers one byte.
// kPingPong: `page_bytes` bytes follow and are answered by as many, `count` times.
enum class Kind : uint64_t { kPages = 1, kPingPong = 2 };
struct Request {
  Kind kind{};
  uint64_t count = 0;
  uint64_t page_bytes = 0;
};

// More than any workload has. It bounds the memory that a request makes the target allocate (64 MiB).
constexpr uint64_t kMaxCount = 8U << 20;
// Pages in one sendmsg or recvmsg. 16 pages of 64 KiB fill a socket buffer; more gained nothing.
constexpr size_t kPagesPerCall = 16;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::system_category(), what); }

UniqueFd checked(int fd, const char* what) {
  if (fd < 0) fail(what);
  return UniqueFd(fd);
}

void no_delay(int fd) {
  const int on = 1;
  if (::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) < 0) fail("setsockopt(TCP_NODELAY)");
}

sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

enum class Direction { kSend, kReceive };

// Moves all bytes of `parts`, and modifies its entries. Returns false if the peer closed before the first byte.
bool move_all(int fd, std::span<iovec> parts, Direction direction) {
  bool first = true;
  size_t done = 0;
  while (done < parts.size()) {
    msghdr message{};
    message.msg_iov = &parts[done];
    message.msg_iovlen = parts.size() - done;
    ssize_t moved = direction == Direction::kSend ? ::sendmsg(fd, &message, MSG_NOSIGNAL) : ::recvmsg(fd, &message, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) fail(direction == Direction::kSend ? "sendmsg" : "recvmsg");
    if (moved == 0 && direction == Direction::kReceive) {
      if (first) return false;
      throw std::system_error(ECONNRESET, std::system_category(), "recvmsg: closed in the middle");
    }
    first = false;
    while (done < parts.size() && static_cast<size_t>(moved) >= parts[done].iov_len) {
      moved -= static_cast<ssize_t>(parts[done++].iov_len);
    }
    if (done < parts.size()) {
      parts[done].iov_base = static_cast<std::byte*>(parts[done].iov_base) + moved;
      parts[done].iov_len -= static_cast<size_t>(moved);
    }
  }
  return true;
}

bool move_all(int fd, void* data, size_t bytes, Direction direction) {
  iovec part{data, bytes};
  return move_all(fd, {&part, 1}, direction);
}

void receive_all(int fd, void* data, size_t bytes) {
  if (!move_all(fd, data, bytes, Direction::kReceive)) {
    throw std::system_error(ECONNRESET, std::system_category(), "recvmsg: closed by the peer");
  }
}

void move_pages(int fd, const PageList& pages, Direction direction) {
  std::array<iovec, kPagesPerCall> parts;
  const size_t n = pages.slots.size();
  for (size_t first = 0; first < n; first += kPagesPerCall) {
    const size_t count = std::min(kPagesPerCall, n - first);
    for (size_t i = 0; i < count; ++i) parts[i] = {pages.page(first + i), pages.page_bytes};
    if (!move_all(fd, {parts.data(), count}, direction)) {
      throw std::system_error(ECONNRESET, std::system_category(), "recvmsg: closed by the peer");
    }
  }
}

}  // namespace

SocketTarget::SocketTarget(std::byte* pool, uint64_t pool_bytes)
    : pool_(pool),
      pool_bytes_(pool_bytes),
      listener_(checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket")),
      stop_(checked(::eventfd(0, EFD_CLOEXEC), "eventfd")) {
  sockaddr_in address = loopback(0);
  socklen_t length = sizeof address;
  if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), length) < 0) fail("bind");
  if (::listen(listener_.get(), 1) < 0) fail("listen");
  if (::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &length) < 0) fail("getsockname");
  port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { serve(); });
}

SocketTarget::~SocketTarget() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void SocketTarget::serve() {
  std::array<pollfd, 2> wait{{{listener_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}}};
  if (::poll(wait.data(), wait.size(), -1) < 0 || (wait[1].revents & POLLIN) != 0) return;
  const UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!connection) return;
  try {
    no_delay(connection.get());
    serve_connection(connection.get());
  } catch (const std::exception&) {
    // The connection closes with this thread, by which its initiator learns of the failure.
  }
}

void SocketTarget::serve_connection(int fd) {
  std::array<pollfd, 2> wait{{{fd, POLLIN, 0}, {stop_.get(), POLLIN, 0}}};
  std::vector<int64_t> slots;
  while (::poll(wait.data(), wait.size(), -1) >= 0 && (wait[1].revents & POLLIN) == 0) {
    Request request;
    if (!move_all(fd, &request, sizeof request, Direction::kReceive)) return;
    if (request.count > kMaxCount || request.page_bytes > pool_bytes_) return;
    if (request.kind == Kind::kPages) {
      slots.resize(request.count);
      receive_all(fd, slots.data(), slots.size() * sizeof(int64_t));
      check_within(slots, request.page_bytes, pool_bytes_);
      move_pages(fd, {pool_, slots, request.page_bytes}, Direction::kReceive);
      std::byte answer{1};
      move_all(fd, &answer, 1, Direction::kSend);
    } else {
      for (uint64_t i = 0; i < request.count; ++i) {
        receive_all(fd, pool_, request.page_bytes);
        move_all(fd, pool_, request.page_bytes, Direction::kSend);
      }
    }
  }
}

SocketInitiator::SocketInitiator(std::byte* pool, uint16_t port)
    : pool_(pool), connection_(checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket")) {
  const sockaddr_in address = loopback(port);
  if (::connect(connection_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) < 0) fail("connect");
  no_delay(connection_.get());
}

void SocketInitiator::write_pages(std::span<const int64_t> target_slots, const PageList& source) {
  const int fd = connection_.get();
  Request request{Kind::kPages, target_slots.size(), source.page_bytes};
  std::array<iovec, 2> head{
      {{&request, sizeof request}, {const_cast<int64_t*>(target_slots.data()), target_slots.size_bytes()}}};
  move_all(fd, head, Direction::kSend);
  move_pages(fd, source, Direction::kSend);
  std::byte answer{};
  receive_all(fd, &answer, 1);
}

std::vector<double> SocketInitiator::ping_pong(uint64_t bytes, uint32_t iterations, uint32_t pause_us) {
  using Clock = std::chrono::steady_clock;
  const int fd = connection_.get();
  Request request{Kind::kPingPong, iterations, bytes};
  move_all(fd, &request, sizeof request, Direction::kSend);
  std::vector<double> halves;
  halves.reserve(iterations);
  for (uint32_t i = 0; i < iterations; ++i) {
    if (pause_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
    const auto start = Clock::now();
    move_all(fd, pool_, bytes, Direction::kSend);
    receive_all(fd, pool_, bytes);
    halves.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() / 2);
  }
  return halves;
}

}  // namespace kvc::bench
