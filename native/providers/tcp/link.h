// Link: the connections between this domain and one domain of a peer. They live and break together.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/domain.h"
#include "providers/tcp/connection.h"
#include "providers/tcp/wire.h"

namespace kvc::tcp {

using Clock = std::chrono::steady_clock;

class Link {
 public:
  Link(Shared& shared, LinkId id, uint16_t connections);

  LinkId id() const noexcept { return id_; }
  const std::vector<std::unique_ptr<Connection>>& connections() const noexcept { return connections_; }
  bool up() const noexcept;

  // The offering side: keeps the secrets that prove the two ends of each connection to each other.
  void expect(const Secret& dialer, const Secret& listener);
  // The offering side: `connections` of them will be dialed; the others are void.
  void limit(uint16_t connections);
  // The offering side: the connection that a stranger's Hello may take over; null if it proves nothing. The secret
  // opens each connection once.
  Connection* admit(const Hello& hello) noexcept;
  // The offering side: what it shows on that connection.
  Welcome welcome(uint16_t index) const noexcept;

  // Spreads batches: the connection with the fewest unacknowledged bytes takes it.
  Posted post(const WriteBatch& batch);
  Posted send(WorkId work, std::span<const std::byte> message);

  // Closes every connection, then completes every posted batch with its refusal or else with `error`.
  void close(const Error& error);

  // By when all connections have to be up; none: no such wait.
  std::optional<Clock::time_point> deadline;

 private:
  // The connection with the fewest unacknowledged bytes.
  Connection& least_loaded() const noexcept;

  const LinkId id_;
  bool offered_ = false;
  Secret dialer_;
  Secret listener_;
  std::vector<std::unique_ptr<Connection>> connections_;
};

}  // namespace kvc::tcp
