#include "providers/same_host/rendezvous.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <utility>

namespace kvc::same_host {

namespace {

// Epoll data: a link's id (with Connection::kProcessEvent for its peer's process), or one of these bits.
constexpr uint64_t kListenerEvent = 1ULL << 62;
constexpr uint64_t kStrangerEvent = 1ULL << 63;  // and the descriptor

// A peer says who it is right after it has dialled, so more than a few are somebody's mistake.
constexpr size_t kMaxStrangers = 64;

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

  uint64_t suffix = 0;
  if (Status random = fill_random(std::as_writable_bytes(std::span(&suffix, 1))); !random) {
    return lane_.named(random.error());
  }
  std::snprintf(socket_name_.data(), socket_name_.size(), "%s%016" PRIx64, lane_.socket, suffix);
  Result<UniqueFd> listener = listen_on(name_of(socket_name_));
  if (!listener) return lane_.named(listener.error());
  listener_ = std::move(listener.value());

  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kListenerEvent;
  if (!epoll_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0) {
    return lane_.named(kernel_error("open", "epoll", errno));
  }
  return {};
}

// --- The offerer

Result<Invitation> Rendezvous::invite() const {
  Invitation invitation{.magic = lane_.magic, .version = lane_.version, .socket = socket_name_};
  std::copy(boot_id_.begin(), boot_id_.end(), invitation.boot_id.begin());
  if (Status random = fill_random(std::as_writable_bytes(std::span(invitation.secret))); !random) {
    return lane_.named(random.error());
  }
  return invitation;
}

void Rendezvous::hear_all() {
  admit_strangers();
  for (auto& [fd, stranger] : std::exchange(strangers_, {})) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
    hear(std::move(stranger));
  }
}

void Rendezvous::admit_strangers() {
  for (;;) {
    UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return;
    }
    const Result<PeerProcess> peer = peer_process(socket.get());
    if (peer && peer.value().uid == geteuid()) hear({std::move(socket), peer.value().pid});
  }
}

// Reads a stranger's first message; keeps the stranger if it has not arrived yet, and forgets it if it is no hello.
void Rendezvous::hear(PeerSocket stranger) {
  Message message;
  std::array<UniqueFd, kMaxDescriptors> descriptors;
  const int fd = stranger.fd.get();
  const Received received = receive_message(fd, message, descriptors);
  if (received == Received::kNothing) {
    if (strangers_.size() >= kMaxStrangers) return;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = kStrangerEvent | static_cast<uint64_t>(fd);
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) strangers_.emplace(fd, std::move(stranger));
    return;
  }
  if (received != Received::kMessage || message.kind != MessageKind::kHello) return;
  Result<Mapping> segment = map_peer_memory(descriptors[0].get(), lane_.segment_bytes, Others::kWrite);
  Result<Mapping> board = map_peer_memory(descriptors[1].get(), lane_.board_bytes, Others::kRead);
  if (!segment || !board) return;
  welcome_({std::move(stranger), message.secret, std::move(segment.value()), std::move(board.value())});
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

Result<Mapping> Rendezvous::say_hello(const PeerSocket& peer, const Secret& secret) const {
  Result<SealedMemory> segment = create_sealed_memory(lane_.segment, lane_.segment_bytes, Others::kWrite);
  if (!segment) return lane_.named(segment.error());
  const std::array descriptors{segment.value().fd.get(), board_fd()};
  if (send_message(peer.fd.get(), {.kind = MessageKind::kHello, .secret = secret}, descriptors) != Sent::kYes) {
    return lane_.error(ErrorCode::kNotReachable, "accept", "the peer hung up");
  }
  return std::move(segment.value().mapping);
}

// --- Events

bool Rendezvous::serve(const std::function<void(LinkId, bool process)>& on_link) {
  std::array<epoll_event, 16> events;
  const int ready = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < ready; ++i) {
    const uint64_t data = events[static_cast<size_t>(i)].data.u64;
    if (data == kListenerEvent) {
      admit_strangers();
    } else if ((data & kStrangerEvent) != 0) {
      const auto fd = static_cast<int>(data & ~kStrangerEvent);
      auto stranger = strangers_.extract(fd);
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
      if (stranger) hear(std::move(stranger.mapped()));
    } else {
      on_link(static_cast<LinkId>(data), (data & Connection::kProcessEvent) != 0);
    }
  }
  return ready > 0;
}

}  // namespace kvc::same_host
