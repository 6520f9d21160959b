#include "providers/tcp/lingering_sockets.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>

namespace kvc::tcp {
namespace {

// Bytes read at a time: 10 us at the 6 GB/s of one connection over loopback.
constexpr size_t kPartBytes = 64 << 10;
// Bytes read from one socket in one turn: 150 us, on a thread that may block.
constexpr size_t kTurnBytes = 1 << 20;
// The largest content of a receive buffer (net.ipv4.tcp_rmem: 32 MiB at most on common systems).
constexpr size_t kBufferBytes = 32 << 20;

// Drops up to `limit` received bytes. Returns true if no more follow: the peer has ended its side, or the connection
// broke.
bool heard_out(const UniqueFd& socket, size_t limit) {
  std::array<std::byte, kPartBytes> part;  // NOLINT: written before it is read, if it ever were
  for (size_t heard = 0; heard < limit;) {
    const ssize_t got = ::recv(socket.get(), part.data(), part.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno != EAGAIN && errno != EWOULDBLOCK;
    if (got == 0) return true;
    heard += static_cast<size_t>(got);
  }
  return false;
}

}  // namespace

Result<std::shared_ptr<LingeringSockets>> LingeringSockets::create(const Tuning& tuning) {
  Result<Epoll> epoll = Epoll::create();
  if (!epoll) return epoll.error();
  Result<TimerFd> timer = TimerFd::create("tcp");
  if (!timer) return timer.error();
  auto lingering = std::make_shared<LingeringSockets>(tuning, std::move(epoll.value()), std::move(timer.value()));
  Status added = lingering->epoll_.add(lingering->timer_.fd(), EPOLLIN, lingering->timer_watched_);
  if (!added) return added.error();
  return lingering;
}

LingeringSockets::LingeringSockets(const Tuning& tuning, Epoll epoll, TimerFd timer)
    : tuning_(tuning), epoll_(std::move(epoll)), timer_(std::move(timer)) {}

LingeringSockets::~LingeringSockets() {
  for (const Lingering& left : sockets_) (void)heard_out(left.socket, kBufferBytes);
}

void LingeringSockets::add(UniqueFd socket) {
  if (heard_out(socket, kTurnBytes)) return;
  if (sockets_.size() >= tuning_.max_lingering) end_oldest();
  Lingering& left = sockets_.emplace_back(std::move(socket), TimerFd::Clock::now() + tuning_.closing_timeout);
  if (!epoll_.add(left.socket.get(), EPOLLIN, left)) sockets_.pop_back();
  arm_timer();
}

void LingeringSockets::serve() {
  std::array<epoll_event, 16> room;
  for (const epoll_event& event : epoll_.ready(room)) {
    auto* const watched = static_cast<Watched*>(event.data.ptr);
    if (watched->kind == Watched::Kind::kTimer) continue;
    auto& left = static_cast<Lingering&>(*watched);
    if (!heard_out(left.socket, kTurnBytes)) continue;
    epoll_.remove(left.socket.get());
    sockets_.remove_if([&left](const Lingering& other) { return &other == &left; });
  }
  // After the events, because events name sockets that this ends.
  const auto now = TimerFd::Clock::now();
  while (!sockets_.empty() && sockets_.front().until <= now) end_oldest();
  arm_timer();
}

void LingeringSockets::end_oldest() {
  epoll_.remove(sockets_.front().socket.get());
  hang_up(sockets_.front().socket);
  sockets_.pop_front();
}

void LingeringSockets::arm_timer() {
  timer_.arm(sockets_.empty() ? std::nullopt : std::optional(sockets_.front().until));
}

}  // namespace kvc::tcp
