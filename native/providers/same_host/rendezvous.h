// Rendezvous: makes the connections between a domain and its peers.
//
// It owns the listening socket, the strangers (accepted dials without a hello), and the board. A link begins with three
// steps. The offerer invites, the acceptor dials and sends a hello with the invitation's secret, and the offerer admits
// it. So a flood of dials, or of silent peers, loads the control thread alone.
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

// Used on the control thread only; nothing here waits for a peer.
class Rendezvous {
 public:
  // The lane outlives this.
  explicit Rendezvous(const Lane& lane) : lane_(lane) {}
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // Makes the board and listens. Call it once, before anything else.
  Status open();
  // Our own board, which the domain writes. This object owns the memory.
  template <typename Board>
  Board& board() const noexcept {
    return *reinterpret_cast<Board*>(board_.mapping.data());
  }

  // A descriptor that is readable when a peer has dialled or sent a hello. serve() handles that, bounded.
  int fd() const noexcept { return epoll_.get(); }
  void serve();

  // --- The offerer.

  // Returns an invitation with a new secret, valid for one connection over this link.
  Result<Invitation> invite(LinkId link);
  // Returns the connection of the peer that came with the invitation. The invitation is used up in every case, because
  // a peer sends its hello before it answers. kPeerDown: no peer came.
  Result<std::unique_ptr<Connection>> admit(LinkId link);
  // Voids the invitation.
  void withdraw(LinkId link) { invited_.erase(link); }

  // --- The acceptor, in this order.

  // Decodes an offer (an Invitation, and the lane's additions), which must be from this machine and of our version.
  template <typename Offer>
  Result<Offer> read_offer(std::span<const std::byte> bytes) const {
    // An offer of any version begins with an Invitation, which names the version.
    const auto invitation =
        from_bytes<Invitation>(bytes.first(std::min(bytes.size(), sizeof(Invitation))), lane_.magic);
    if (invitation) {
      if (Status fits = check(*invitation); !fits) return fits.error();
    }
    const std::optional<Offer> offer = from_bytes<Offer>(bytes, lane_.magic);
    if (!offer) return lane_.error(ErrorCode::kInvalidArgument, "accept", "malformed offer");
    return *offer;
  }
  // Connects to the inviting process, which must belong to our own user.
  Result<PeerSocket> dial(const Invitation& invitation) const;
  // Makes the link's segment, and sends its descriptor and our board's to the peer.
  Result<std::unique_ptr<Connection>> say_hello(PeerSocket peer, const Secret& secret) const;

 private:
  struct Invited {
    Secret secret;
    // of the peer that came with the secret; the secret is used up once this is set
    std::unique_ptr<Connection> connection;
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
  std::deque<PeerSocket> strangers_;  // accepted dials without a hello, oldest first
  std::map<LinkId, Invited> invited_;
};

}  // namespace kvc::same_host
