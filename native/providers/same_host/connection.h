// Connection: the socket of one link, the process at its other end, and the memory that both map.
//
// Set up by either role: the offerer expects a secret until a newcomer knows it, the acceptor has dialled. The socket
// carries descriptors and wake-ups, and its end tells that the peer is gone.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>

#include "engine/domain.h"
#include "engine/unique_fd.h"
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

// The worker thread; nothing here blocks.
class Connection {
 public:
  enum class Role : uint8_t { kOfferer, kAcceptor };
  using Descriptors = std::array<UniqueFd, kMaxDescriptors>;

  // In the data of an event of the link: it is about the peer's process, and not about the socket.
  static constexpr uint64_t kProcessEvent = 1ULL << 61;

  // The lane and the epoll descriptor outlive the connection. The data of its events is the link's id.
  Connection(const Lane& lane, LinkId link, int epoll) : lane_(lane), link_(link), epoll_(epoll) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // --- Set-up, in this order.

  void expect(const Secret& secret) noexcept { secret_ = secret; }
  // True, once, for the secret that expect() was given.
  bool admit(const Secret& secret) noexcept;
  // `segment` is a mapping of a whole segment of the lane.
  Status attach(PeerSocket peer, Mapping segment, Role role);
  // `board` is a read-only mapping of the peer's board.
  void meet(Mapping board) noexcept { board_ = std::move(board); }
  // The same for the acceptor, which gets it with the peer's kWelcome. False: that was none.
  bool meet(const Descriptors& welcome);

  bool attached() const noexcept { return static_cast<bool>(segment_); }
  bool met() const noexcept { return static_cast<bool>(board_); }
  pid_t pid() const noexcept { return pid_; }
  const UniqueFd& process() const noexcept { return pidfd_; }  // readable once it is gone; may be none
  // The memory as the lane sees it, valid as long as this: directions after attach(), the board after meet().
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

  Sent send(const Message& message, std::span<const int> descriptors) const;
  // Which events of the socket the link is told of.
  void watch(uint32_t events) const;
  // Reads a bounded number of messages, and hands each to `handle`, which says whether it makes sense and does not end
  // the link. kClosed and kMalformed are the end of the link; what_ended() has the words.
  Received receive(const std::function<bool(const Message&, Descriptors&)>& handle) const;
  Error what_ended(Received how) const;
  // The peer sleeps, and nobody has woken it: the caller sends kWake. True once for each sleep.
  bool begin_wake() noexcept;

  // --- The end.

  // Tells of no more events, and admits nobody.
  void stop();
  // Closes the socket, which tells the peer. Not before the peer is fenced: its end tells us that the peer is gone.
  void hang_up();
  // The peer's process has ended, or if the kernel does not tell, its end of the socket.
  bool peer_is_gone() const;

 private:
  const Lane& lane_;
  const LinkId link_;
  const int epoll_;
  std::optional<Secret> secret_;

  UniqueFd socket_;
  UniqueFd pidfd_;
  pid_t pid_ = 0;
  Role role_ = Role::kOfferer;
  Mapping segment_;
  Mapping board_;
  uint64_t woken_ = 0;  // the peer's sleep that we have ended already
};

}  // namespace kvc::same_host
