// Connection: the socket of one link, the peer's process, and the memory that both processes map.
//
// The rendezvous creates it complete, except for the acceptor's view of the peer's board, which arrives with kWelcome.
// The socket carries descriptors and wake-ups, and its end shows that the peer is gone.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>

#include "base/unique_fd.h"
#include "lane/domain.h"
#include "providers/same_host/channel.h"
#include "providers/same_host/lane.h"
#include "providers/same_host/system.h"
#include "providers/same_host/wire.h"

namespace kvc::same_host {

// A socket and the process id of its peer.
struct PeerSocket {
  UniqueFd fd;
  pid_t pid = 0;
};

// One owner at a time: the connector, then the domain. Only the destructor blocks, because it unmaps.
class Connection : public LinkEnd {
 public:
  enum class Role : uint8_t { kOfferer, kAcceptor };
  using Descriptors = std::array<UniqueFd, kMaxDescriptors>;

  // `segment` is the mapping of a whole segment. `lane` outlives this object.
  Connection(const Lane& lane, PeerSocket peer, Mapping segment, Role role);
  // Stores `board`, a read-only mapping of the peer's board.
  void meet(Mapping board) noexcept { board_ = std::move(board); }
  // Maps the peer's board, for the acceptor, from the descriptors of the peer's kWelcome. Returns false if the message
  // was malformed.
  bool meet(const Descriptors& welcome);

  bool met() const noexcept { return static_cast<bool>(board_); }
  pid_t pid() const noexcept { return pid_; }
  const UniqueFd& socket() const noexcept { return socket_; }
  const UniqueFd& process() const noexcept { return pidfd_; }  // readable once the process is gone; may be empty
  // incoming() and outgoing() return the two directions of the segment, board() the peer's board. All are valid as long
  // as this object. board() must not be called before met().
  template <typename Segment>
  auto& incoming() const noexcept {
    auto& segment = *reinterpret_cast<Segment*>(segment_.data());
    return role_ == Role::kOfferer ? segment.to_offerer : segment.to_acceptor;
  }
  template <typename Segment>
  auto& outgoing() const noexcept {
    auto& segment = *reinterpret_cast<Segment*>(segment_.data());
    return role_ == Role::kOfferer ? segment.to_acceptor : segment.to_offerer;
  }
  template <typename Board>
  const Board& board() const noexcept {
    return *reinterpret_cast<const Board*>(board_.data());
  }

  // --- Control messages.

  Sent send(const Message& message, std::span<const int> descriptors = {}) const;
  // Reads a bounded number of messages and passes each to `handle`, which returns false for a malformed one. kClosed
  // and kMalformed end the link; what_ended() returns the error for them.
  Received receive(const std::function<bool(const Message&, Descriptors&)>& handle) const;
  Error what_ended(Received how) const;
  // Whether the caller must send kWake: the peer sleeps, and no wake-up was sent for this sleep. Returns true once for
  // each sleep. Must not be called before met().
  bool begin_wake() noexcept;

  // --- The end.

  // Shuts the socket down, by which the peer knows that no write of this side is in flight any more. A peer without a
  // pidfd relies on this.
  void hang_up() const;
  // Whether the peer's process has ended. If the kernel offers no pidfd, whether the peer has closed its end of the
  // socket. Without process(), only for a closed link.
  bool peer_is_gone() const;
  // Whether the peer has closed the socket. Each call drops a bounded number of unread messages. Only for a closed
  // link, whose messages are not read otherwise. For an open link, receive() reports the end.
  bool hung_up() const;

 private:
  const Lane& lane_;
  const Role role_;
  const pid_t pid_;
  const UniqueFd socket_;
  const UniqueFd pidfd_;
  const Mapping segment_;
  Mapping board_;
  uint64_t woken_ = 0;  // the number of the peer's sleep that was last ended by a wake-up
};

}  // namespace kvc::same_host
