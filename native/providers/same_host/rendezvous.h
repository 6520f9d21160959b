// Rendezvous: where the peers of a domain find it, and what they find there.
//
// It owns the listening socket, those who have dialled and not said who they are, and the board. A link begins with
// three steps: the offerer invites, the acceptor dials and says hello with the invitation's secret, and the offerer
// admits it. So a flood of dials, or of peers that dial and say nothing, is the control thread's burden alone.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/random.h"
#include "base/unique_fd.h"
#include "lane/domain.h"
#include "providers/same_host/connection.h"
#include "providers/same_host/lane.h"
#include "providers/same_host/system.h"
#include "providers/same_host/wire.h"

namespace kvc::same_host {

// The control thread; nothing here waits for a peer.
class Rendezvous {
 public:
  // The lane outlives this.
  explicit Rendezvous(const Lane& lane) : lane_(lane) {}
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // Once, before anything else: makes the board and listens.
  Status open();
  // Our own board, for the domain to write. The memory is this object's.
  template <typename Board>
  Board& board() const noexcept {
    return *reinterpret_cast<Board*>(board_.mapping.data());
  }

  // Readable when somebody has dialled, or said hello; for serve(), which is bounded.
  int fd() const noexcept { return epoll_.get(); }
  void serve();

  // --- The offerer.

  // With a new secret, good for one connection over this link.
  Result<Invitation> invite(LinkId link);
  // The connection of the peer that came with the invitation, which is used up whatever comes of this: a peer says hello
  // before it answers. kPeerDown: none came.
  Result<std::unique_ptr<Connection>> admit(LinkId link);
  // The invitation is void.
  void withdraw(LinkId link) { invited_.erase(link); }

  // --- The acceptor, in this order.

  // An offer (an Invitation, and what the lane adds to it) from this machine and of our version.
  template <typename Offer>
  Result<Offer> read_offer(std::span<const std::byte> bytes) const {
    // First what an offer of any version begins with: it says which one it is.
    const auto invitation =
        from_bytes<Invitation>(bytes.first(std::min(bytes.size(), sizeof(Invitation))), lane_.magic);
    if (invitation) {
      if (Status fits = check(*invitation); !fits) return fits.error();
    }
    const std::optional<Offer> offer = from_bytes<Offer>(bytes, lane_.magic);
    if (!offer) return lane_.error(ErrorCode::kInvalidArgument, "accept", "malformed offer");
    return *offer;
  }
  // Connects, to a process of our own user.
  Result<PeerSocket> dial(const Invitation& invitation) const;
  // Makes the link's segment, and shows it and our board to the peer.
  Result<std::unique_ptr<Connection>> say_hello(PeerSocket peer, const Secret& secret) const;

 private:
  struct Invited {
    Secret secret;
    std::unique_ptr<Connection> connection;  // of who came with the secret: nobody else may after that
  };

  Status check(const Invitation& invitation) const;
  void let_in(int dials);
  bool hear(PeerSocket& stranger);
  bool watch(int fd) const;
  void unwatch(int fd) const;

  const Lane& lane_;
  std::string boot_id_;
  std::array<char, 28> socket_name_{};
  SealedMemory board_;
  UniqueFd epoll_;
  UniqueFd listener_;
  std::deque<PeerSocket> strangers_;  // have dialled and not said who they are, oldest first
  std::map<LinkId, Invited> invited_;
};

}  // namespace kvc::same_host
