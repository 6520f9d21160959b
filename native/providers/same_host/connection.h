// Connection: the socket of one link, the process at its other end, and the memory that both map.
//
// The rendezvous makes it, whole but for the acceptor's view of the peer's board, which comes with kWelcome. The socket
// carries descriptors and wake-ups, and its end tells that the peer is gone.
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

// A socket, and who is at its other end.
struct PeerSocket {
  UniqueFd fd;
  pid_t pid = 0;
};

// One owner at a time: the connector, then the domain. Nothing here blocks but the end, which unmaps.
class Connection : public LinkEnd {
 public:
  enum class Role : uint8_t { kOfferer, kAcceptor };
  using Descriptors = std::array<UniqueFd, kMaxDescriptors>;

  // `segment` is a mapping of a whole segment of the lane, which outlives this.
  Connection(const Lane& lane, PeerSocket peer, Mapping segment, Role role);
  // `board` is a read-only mapping of the peer's board.
  void meet(Mapping board) noexcept { board_ = std::move(board); }
  // The same for the acceptor, with the peer's kWelcome. False: that was none.
  bool meet(const Descriptors& welcome);

  bool met() const noexcept { return static_cast<bool>(board_); }
  pid_t pid() const noexcept { return pid_; }
  const UniqueFd& socket() const noexcept { return socket_; }
  const UniqueFd& process() const noexcept { return pidfd_; }  // readable once it is gone; may be none
  // The memory as the lane sees it, valid as long as this; the board once they have met.
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
  // Reads a bounded number of messages, and hands each to `handle`, which says whether it makes sense. kClosed and
  // kMalformed are the end of the link; what_ended() has the words.
  Received receive(const std::function<bool(const Message&, Descriptors&)>& handle) const;
  Error what_ended(Received how) const;
  // The peer sleeps, and nobody has woken it: the caller sends kWake. True once for each sleep. Not before they have met.
  bool begin_wake() noexcept;

  // --- The end.

  // Tells the peer that nothing of ours is under way any more: without a pidfd it takes the end of the socket for that.
  void hang_up() const;
  // The peer's process has ended, or if the kernel does not tell, its end of the socket. Without process(), only for a link
  // that is closed.
  bool peer_is_gone() const;
  // The peer has closed the socket. Reads away what is before that, a bounded number of messages a call: only for a link that
  // is closed, as nobody else reads then. An open link's end shows in receive().
  bool hung_up() const;

 private:
  const Lane& lane_;
  const Role role_;
  const pid_t pid_;
  const UniqueFd socket_;
  const UniqueFd pidfd_;
  const Mapping segment_;
  Mapping board_;
  uint64_t woken_ = 0;  // the peer's sleep that we have ended already
};

}  // namespace kvc::same_host
