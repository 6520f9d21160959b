#include "providers/same_host/rendezvous.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/process.h"

namespace kvc::same_host {

namespace {

// A peer sends its hello right after it has dialled, so more than a few strangers are a mistake.
constexpr size_t kMaxStrangers = 64;

// Strangers that are accepted in one turn of the control thread. 64 of them take 0.3 ms.
constexpr int kDialsPerTurn = 64;

std::string_view name_of(const std::array<char, 28>& zero_filled) {
  return {zero_filled.data(), strnlen(zero_filled.data(), zero_filled.size())};
}

}  // namespace

Status Rendezvous::open() {
  boot_id_ = boot_id();
  if (boot_id_.size() != Invitation{}.boot_id.size()) {
    return lane_.error(ErrorCode::kSystem, "open", "cannot read /proc/sys/kernel/random/boot_id");
  }
  Result<SealedMemory> board = create_sealed_memory(lane_.board, lane_.board_bytes, Others::kRead);
  if (!board) return lane_.named(board.error());
  board_ = std::move(board.value());

  std::snprintf(socket_name_.data(), socket_name_.size(), "%s%016" PRIx64, lane_.socket, random_key());
  Result<UniqueFd> listener = listen_on(name_of(socket_name_));
  if (!listener) return lane_.named(listener.error());
  listener_ = std::move(listener.value());

  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_ || !watch(listener_.get())) return lane_.named(kernel_error("open", "epoll", errno));
  return {};
}

// A descriptor stays watched until unwatch(). Closing it is not enough: a forked child may keep it open.
bool Rendezvous::watch(int fd) const {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void Rendezvous::unwatch(int fd) const { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

// --- Dials

void Rendezvous::serve() {
  std::array<epoll_event, 16> events;
  const int ready = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < ready; ++i) {
    const int fd = events[static_cast<size_t>(i)].data.fd;
    if (fd == listener_.get()) {
      let_in(kDialsPerTurn);
      continue;
    }
    const auto stranger =
        std::find_if(strangers_.begin(), strangers_.end(), [fd](const PeerSocket& one) { return one.fd.get() == fd; });
    if (stranger != strangers_.end() && hear(*stranger)) strangers_.erase(stranger);
  }
}

// Accepts up to `dials` waiting connections. If too many strangers are silent, the oldest is dismissed. It is read once
// more before, because its hello may have arrived meanwhile.
void Rendezvous::let_in(int dials) {
  for (; dials > 0; --dials) {
    UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (!socket) {
      // A waiting dial would end every sleep. The listener stays unwatched until the next admit(), which accepts dials
      // itself.
      if (errno == EMFILE || errno == ENFILE) unwatch(listener_.get());
      return;
    }
    const Result<PeerProcess> peer = peer_process(socket.get());
    if (!peer || peer.value().uid != geteuid()) continue;
    PeerSocket stranger{std::move(socket), peer.value().pid};
    if (hear(stranger)) continue;
    if (strangers_.size() == kMaxStrangers) {
      if (!hear(strangers_.front())) unwatch(strangers_.front().fd.get());
      strangers_.pop_front();
    }
    if (watch(stranger.fd.get())) strangers_.push_back(std::move(stranger));
  }
}

// Reads a stranger's first message. Returns true if it arrived. The stranger is dropped then, unless the message made
// it a connection.
bool Rendezvous::hear(PeerSocket& stranger) {
  Message message;
  Connection::Descriptors descriptors;
  const Received received = receive_message(stranger.fd.get(), message, descriptors);
  if (received == Received::kNothing) return false;
  unwatch(stranger.fd.get());
  if (received != Received::kMessage || message.kind != MessageKind::kHello) return true;
  const auto found = std::find_if(invited_.begin(), invited_.end(), [&message](const auto& entry) {
    return entry.second.connection == nullptr && entry.second.secret.equals(message.secret);
  });
  if (found == invited_.end()) return true;
  Result<Mapping> segment = map_peer_memory(descriptors[0].get(), lane_.segment_bytes, Others::kWrite);
  Result<Mapping> board = map_peer_memory(descriptors[1].get(), lane_.board_bytes, Others::kRead);
  if (!segment || !board) return true;
  found->second.connection =
      std::make_unique<Connection>(lane_, std::move(stranger), std::move(segment.value()), Connection::Role::kOfferer);
  found->second.connection->meet(std::move(board.value()));
  return true;
}

// --- The offerer

Result<Invitation> Rendezvous::invite(LinkId link) {
  const auto [entry, fresh] = invited_.try_emplace(link, Invited{Secret::make(), nullptr});
  if (!fresh) return lane_.error(ErrorCode::kInvalidArgument, "offer", "a link with this id exists already");
  Invitation invitation{.magic = lane_.magic, .version = lane_.version, .socket = socket_name_};
  std::copy(boot_id_.begin(), boot_id_.end(), invitation.boot_id.begin());
  invitation.secret = entry->second.secret;
  return invitation;
}

Result<std::unique_ptr<Connection>> Rendezvous::admit(LinkId link) {
  const auto found = invited_.find(link);
  if (found == invited_.end()) return lane_.error(ErrorCode::kInvalidArgument, "complete", "no such offer");
  if (found->second.connection == nullptr) {
    // The dial waits in the kernel's queue, or it was accepted before its hello arrived.
    watch(listener_.get());  // may be unwatched since descriptors ran out
    let_in(kMaxDials);
    for (PeerSocket& stranger : std::exchange(strangers_, {})) {
      if (!hear(stranger)) strangers_.push_back(std::move(stranger));
    }
  }
  std::unique_ptr<Connection> connection = std::move(found->second.connection);
  invited_.erase(found);
  const std::array descriptors{board_.fd.get()};
  if (connection == nullptr || connection->send({.kind = MessageKind::kWelcome}, descriptors) != Sent::kYes) {
    return lane_.error(ErrorCode::kPeerDown, "complete", "the peer answered, but its connection is gone");
  }
  return connection;
}

// --- The acceptor

Status Rendezvous::check(const Invitation& invitation) const {
  if (std::string_view(invitation.boot_id.data(), invitation.boot_id.size()) != boot_id_) {
    return lane_.error(ErrorCode::kNotReachable, "accept", "the peer runs on another machine");
  }
  return lane_.check_version("accept", invitation.version);
}

Result<PeerSocket> Rendezvous::dial(const Invitation& invitation) const {
  Result<UniqueFd> socket = connect_to(name_of(invitation.socket));
  if (!socket) return lane_.named(socket.error());
  const Result<PeerProcess> peer = peer_process(socket.value().get());
  if (!peer) return lane_.named(peer.error());
  if (peer.value().uid != geteuid()) {
    return lane_.error(ErrorCode::kRefused, "accept",
                       "the peer runs as user " + std::to_string(peer.value().uid) + " and this process as " +
                           std::to_string(geteuid()) + ": " + lane_.if_other_users);
  }
  return PeerSocket{std::move(socket.value()), peer.value().pid};
}

Result<std::unique_ptr<Connection>> Rendezvous::say_hello(PeerSocket peer, const Secret& secret) const {
  Result<SealedMemory> segment = create_sealed_memory(lane_.segment, lane_.segment_bytes, Others::kWrite);
  if (!segment) return lane_.named(segment.error());
  auto connection = std::make_unique<Connection>(lane_, std::move(peer), std::move(segment.value().mapping),
                                                 Connection::Role::kAcceptor);
  const std::array descriptors{segment.value().fd.get(), board_.fd.get()};
  if (connection->send({.kind = MessageKind::kHello, .secret = secret}, descriptors) != Sent::kYes) {
    return lane_.error(ErrorCode::kNotReachable, "accept", "the peer hung up");
  }
  return connection;
}

}  // namespace kvc::same_host
