#include "providers/same_host/connection.h"

#include <sys/socket.h>

#include <string>
#include <utility>

#include "base/process.h"

namespace kvc::same_host {

namespace {

// per turn of a peer that floods its socket; a message with a memfd takes 6 us
constexpr uint32_t kMessagesPerTurn = 16;

}  // namespace

Connection::Connection(const Lane& lane, PeerSocket peer, Mapping segment, Role role)
    : lane_(lane),
      role_(role),
      pid_(peer.pid),
      socket_(std::move(peer.fd)),
      pidfd_(open_pidfd(peer.pid)),
      segment_(std::move(segment)) {}

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

Received Connection::receive(const std::function<bool(const Message&, Descriptors&)>& handle) const {
  for (uint32_t i = 0; i < kMessagesPerTurn; ++i) {
    Message message;
    Descriptors descriptors;
    const Received received = receive_message(socket_.get(), message, descriptors);
    if (received != Received::kMessage) return received;
    if (!handle(message, descriptors)) return Received::kMalformed;
    // most messages are single kWakes: this saves the read of an empty socket
    if (message.kind == MessageKind::kWake) break;
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

// The descriptor itself is closed on the control thread, which may block.
void Connection::hang_up() const { shutdown(socket_.get(), SHUT_RDWR); }

bool Connection::peer_is_gone() const {
  // Without a pidfd, the socket's end stands for the process's: the kernel closes it after the peer's last thread has
  // ended.
  return pidfd_ ? is_gone(pidfd_) : hung_up();
}

bool Connection::hung_up() const {
  // A message that is never read would hide the end for ever. The kernel closes the descriptors of dropped messages.
  for (uint32_t i = 0; i < kMessagesPerTurn; ++i) {
    Message unread;
    const ssize_t length = recv(socket_.get(), &unread, sizeof(unread), MSG_DONTWAIT);
    if (length <= 0) return length == 0;
  }
  return false;
}

}  // namespace kvc::same_host
