// Link: the connections between this domain and one domain of a peer. They live and break together.
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

// The domain's thread. Watched for arrivals.
class Link final : public Watched {
 public:
  Link(LinkContext& context, LinkId id, uint16_t connections);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  ~Link() { refuse_arrivals(); }

  LinkId id() const noexcept { return id_; }
  // All connections are up.
  bool up() const noexcept;
  // Nothing more will come over any of them.
  bool ended() const noexcept;

  // Takes what the connector has made.
  Status begin(TcpLinkEnd& end);
  // Takes the connections that have come. An error ends the link.
  Status admit();

  // Spreads batches: the connection with the fewest unacknowledged bytes takes it. On a link that fails it waits for end().
  Posted post(const WriteBatch& batch);
  Posted send(WorkId work, std::span<const std::byte> message);
  // Our engine has the message of this slot.
  void take(uint32_t slot);

  // For its connections: a message has come into the slot. False: the last one there was not taken.
  bool put(uint32_t slot, Connection& bearer);
  // The same: the peer's engine has taken the message of this slot.
  void taken(uint32_t slot);

  // Says the last words on every connection; those that are not up end.
  void part();
  // Ends every connection, then completes all that is posted, with its refusal or else with `failure` or `error`.
  void end(const Error& error);

  // By when all connections have to be up, or, with a failure, to have ended; none: no such wait.
  std::optional<Clock::time_point> deadline;
  // Why the link ends by itself.
  std::optional<Error> failure;

 private:
  // The connection with the fewest unacknowledged bytes.
  Connection& least_loaded() const noexcept;
  void refuse_arrivals();

  LinkContext& context_;
  const LinkId id_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::shared_ptr<Arrivals> arrivals_;  // null once all have come
  SentMessages messages_;
  std::array<Connection*, kMessageSlots> bearers_{};  // by slot: over which the peer's message came; null: it was taken
};

}  // namespace kvc::tcp
