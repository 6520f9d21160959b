// Link: the connections between this domain and one domain of a peer. If one of them breaks, all of them end.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/timer_fd.h"
#include "lane/domain.h"
#include "lane/work_slots.h"
#include "providers/tcp/connection.h"
#include "providers/tcp/link_end.h"

namespace kvc::tcp {

using Clock = TimerFd::Clock;

// Used on the domain's thread only. epoll watches it for arrivals.
class Link final : public Watched {
 public:
  Link(LinkContext& context, LinkId id, uint16_t connections);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  ~Link() { refuse_arrivals(); }

  LinkId id() const noexcept { return id_; }
  // Whether all connections are up.
  bool up() const noexcept;
  // Whether every connection has ended, so that nothing more arrives.
  bool ended() const noexcept;

  // Takes the connector's LinkEnd.
  Status begin(TcpLinkEnd& end);
  // Adopts the connections that the connector has admitted. An error ends the link.
  Status admit();

  // Posts a batch on the connection with the fewest unacknowledged bytes. On a link that fails, the batch waits for
  // end().
  Posted post(const WriteBatch& batch);
  Posted send(WorkId work, std::span<const std::byte> message);
  // Records that our transfer engine has taken the message of this slot.
  void take(uint32_t slot);

  // Called by the connections: a message has arrived in the slot. Returns false if the previous message of the slot was
  // not taken.
  bool put(uint32_t slot, Connection& bearer);
  // Called by the connections: the peer's transfer engine has taken the message of this slot.
  void taken(uint32_t slot);

  // Sends the last words on every connection. Connections that are not up end.
  void part();
  // Ends every connection. Then completes all posted work, with its refusal or else with `failure` or `error`.
  void end(const Error& error);

  // The time by which all connections have to be up. With a failure: by which they have to have ended. Empty: no
  // deadline.
  std::optional<Clock::time_point> deadline;
  // The reason for which the link ends by itself.
  std::optional<Error> failure;

 private:
  // The connection with the fewest unacknowledged bytes.
  Connection& least_loaded() const noexcept;
  void refuse_arrivals();

  LinkContext& context_;
  const LinkId id_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::shared_ptr<Arrivals> arrivals_;  // null once all connections have arrived
  SentMessages messages_;
  // by slot: the connection over which the peer's message came; null: the message was taken
  std::array<Connection*, kMessageSlots> bearers_{};
};

}  // namespace kvc::tcp
