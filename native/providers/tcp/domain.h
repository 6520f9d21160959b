// TcpDomain: one listening socket, one epoll instance, and the links to peers. No thread and no blocking call:
// everything happens in poll().
#pragma once

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/domain.h"
#include "providers/tcp/connection.h"
#include "providers/tcp/link.h"
#include "providers/tcp/socket.h"
#include "providers/tcp/tuning.h"

namespace kvc::tcp {

class TcpDomain final : public Domain {
 public:
  static Result<std::unique_ptr<TcpDomain>> open(const DomainConfig& config, DomainSink& sink, const Tuning& tuning);
  ~TcpDomain() override;

  std::string description() const override;
  uint64_t bits_per_second() const override { return bits_per_second_; }
  Result<uint64_t> register_region(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) override;
  bool deregister_region(uint64_t rkey) override;
  Result<Bytes> offer(LinkId id) override;
  Result<Bytes> accept(LinkId id, std::span<const std::byte> offer) override;
  Status complete(LinkId id, std::span<const std::byte> answer) override;
  bool fence(LinkId id) override;
  Posted post(LinkId id, const WriteBatch& batch) override;
  Posted send(LinkId id, WorkId work, std::span<const std::byte> message) override;
  bool poll() override;
  int fd() const override { return shared_.epoll.fd(); }
  bool prepare_sleep() override { return shared_.sendable.empty(); }

 private:
  // An accepted connection that has not proved whose it is.
  struct Stranger : Watched {
    Stranger(UniqueFd accepted, Clock::time_point until)
        : Watched(Kind::kStranger), socket(std::move(accepted)), deadline(until) {}
    UniqueFd socket;
    Clock::time_point deadline;
    std::array<std::byte, sizeof(Hello)> hello{};
    size_t received = 0;
  };

  TcpDomain(const DomainConfig& config, DomainSink& sink, const Tuning& tuning, Epoll epoll);
  Status start();

  Link* find(LinkId id) noexcept;
  // Takes the link out and closes it. False: it is not there.
  bool remove_link(LinkId id, const Error& error);
  // The link failed by itself: its batches end, then the sink hears of it.
  void break_link(Connection& connection, const Error& error);
  void break_link(LinkId id, const Error& error);

  void accept_strangers();
  void hear(Stranger& stranger);
  void dismiss(Stranger& stranger);
  bool offer_held();

  // Deadlines: one timer for the earliest.
  void arm_timer();
  void expire();

  const DomainConfig config_;
  Shared shared_;
  UniqueFd listener_;
  uint16_t port_ = 0;
  uint64_t bits_per_second_ = 0;
  Watched listener_watched_{Watched::Kind::kListener};
  UniqueFd timer_;
  Watched timer_watched_{Watched::Kind::kTimer};
  std::optional<Clock::time_point> listener_paused_until_;  // out of descriptors
  std::map<LinkId, std::unique_ptr<Link>> links_;
  std::list<Stranger> strangers_;  // oldest first

  // Closed, but perhaps still referred to by the poll() that closed them; the next one frees them.
  std::vector<std::unique_ptr<Link>> closed_links_;
  std::list<Stranger> closed_strangers_;
};

}  // namespace kvc::tcp
