#include "providers/same_host/connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <string>
#include <utility>

namespace kvc::same_host {

namespace {

constexpr uint32_t kMessagesPerTurn = 64;  // a peer that floods its socket has a turn like everyone

}  // namespace

// --- Set-up

bool Connection::admit(const Secret& secret) noexcept {
  if (!secret_ || !equal(*secret_, secret)) return false;
  secret_.reset();
  return true;
}

Status Connection::attach(PeerSocket peer, Mapping segment, Role role) {
  socket_ = std::move(peer.fd);
  pidfd_ = open_pidfd(peer.pid);
  pid_ = peer.pid;
  role_ = role;
  segment_ = std::move(segment);
  for (const UniqueFd* fd : {&socket_, &pidfd_}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = link_ | (fd == &pidfd_ ? kProcessEvent : 0);
    if (*fd && epoll_ctl(epoll_, EPOLL_CTL_ADD, fd->get(), &event) != 0) {
      return lane_.named(kernel_error("attach", "epoll_ctl", errno));
    }
  }
  return {};
}

bool Connection::meet(const Descriptors& welcome) {
  if (role_ != Role::kAcceptor || met()) return false;
  Result<Mapping> board = map_peer_memory(welcome[0].get(), lane_.board_bytes, Others::kRead);
  if (board) meet(std::move(board.value()));
  return met();
}

// --- Control messages

Sent Connection::send(const Message& message, std::span<const int> descriptors) const {
  return send_message(socket_.get(), message, descriptors);
}

void Connection::watch(uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = link_;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, socket_.get(), &event);
}

Received Connection::receive(const std::function<bool(const Message&, Descriptors&)>& handle) const {
  for (uint32_t i = 0; i < kMessagesPerTurn; ++i) {
    Message message;
    Descriptors descriptors;
    const Received received = receive_message(socket_.get(), message, descriptors);
    if (received != Received::kMessage) return received;
    if (!handle(message, descriptors)) return Received::kMalformed;
    if (message.kind == MessageKind::kWake) break;  // by far the most of them, one at a time: spare the empty read
  }
  return Received::kMessage;
}

Error Connection::what_ended(Received how) const {
  return lane_.error(ErrorCode::kPeerDown, "link",
                     how == Received::kClosed
                         ? "the peer (pid " + std::to_string(pid_) + ") closed the link, or is gone"
                         : "the peer sent a malformed control message");
}

bool Connection::begin_wake() noexcept {
  const uint64_t sleep = board<SharedWord>().load(std::memory_order_seq_cst);
  if (sleep % 2 == 0 || sleep == woken_) return false;
  woken_ = sleep;
  return true;
}

// --- The end

void Connection::stop() {
  secret_.reset();
  // By hand: a forked child keeps a descriptor open, and with it its place in the epoll set.
  if (socket_) epoll_ctl(epoll_, EPOLL_CTL_DEL, socket_.get(), nullptr);
  if (pidfd_) epoll_ctl(epoll_, EPOLL_CTL_DEL, pidfd_.get(), nullptr);
}

void Connection::hang_up() {
  socket_.reset();
  pidfd_.reset();
}

bool Connection::peer_is_gone() const {
  if (pidfd_) return is_gone(pidfd_);
  // Without a pidfd the socket has to say it: the kernel closes it after the peer's last thread has ended.
  std::byte unused{};
  return socket_ && recv(socket_.get(), &unused, sizeof(unused), MSG_PEEK | MSG_DONTWAIT) == 0;
}

}  // namespace kvc::same_host
