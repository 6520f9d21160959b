// Rendezvous: where the peers of a domain find it, and what they find there.
//
// It owns the listening socket, those who have dialled and not said who they are, the board, and the descriptor that
// the worker sleeps on. A link begins with three steps: the offerer invites, the acceptor dials and says hello with the
// invitation's secret, and the offerer's rendezvous hands the newcomer to the domain.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "engine/domain.h"
#include "engine/unique_fd.h"
#include "providers/same_host/connection.h"
#include "providers/same_host/lane.h"
#include "providers/same_host/system.h"
#include "providers/same_host/wire.h"

namespace kvc::same_host {

// Somebody has dialled and said hello. Which link it is for, and whether for any, the secret says.
struct Newcomer {
  PeerSocket peer;
  Secret secret;
  Mapping segment;
  Mapping board;
};

// The worker thread; nothing here blocks.
class Rendezvous {
 public:
  // `welcome` is called from serve() and hear_all(). The lane outlives this.
  Rendezvous(const Lane& lane, std::function<void(Newcomer)> welcome) : lane_(lane), welcome_(std::move(welcome)) {}
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // Once, before anything else: makes the board and listens.
  Status open();

  // The descriptor that the worker sleeps on: ours, and those of the connections.
  int epoll() const noexcept { return epoll_.get(); }
  // Our own board, to be written. The memory is this object's.
  template <typename Board>
  Board& board() const noexcept {
    return *reinterpret_cast<Board*>(board_.mapping.data());
  }
  int board_fd() const noexcept { return board_.fd.get(); }

  // --- The offerer.

  // With a new secret.
  Result<Invitation> invite() const;
  // Lets in who has dialled, and hears who was silent before: a peer says hello before it answers.
  void hear_all();

  // --- The acceptor, in this order.

  // Whether the invitation is from this machine and of our version.
  Status check(const Invitation& invitation) const;
  // Connects, to a process of our own user.
  Result<PeerSocket> dial(const Invitation& invitation) const;
  // Makes the link's segment, and shows it and our board to the peer.
  Result<Mapping> say_hello(const PeerSocket& peer, const Secret& secret) const;

  // --- Events.

  // Looks at the descriptors: serves its own, and hands events of links to `on_link`, with whether they are about the
  // peer's process. True if there was one.
  bool serve(const std::function<void(LinkId, bool process)>& on_link);

 private:
  void admit_strangers();
  void hear(PeerSocket stranger);

  const Lane& lane_;
  const std::function<void(Newcomer)> welcome_;
  UniqueFd epoll_;
  UniqueFd listener_;
  std::array<char, 28> socket_name_{};
  std::string boot_id_;
  SealedMemory board_;
  std::map<int, PeerSocket> strangers_;  // by their descriptors: have dialled and not said who they are
};

}  // namespace kvc::same_host
