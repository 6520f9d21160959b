// TcpConnector: the listening socket, the strangers who dial it, offers and their secrets, and dialling. It has an epoll
// instance of its own, so that a flood of connects costs the control thread and no transfer.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/timer_fd.h"
#include "lane/domain.h"
#include "providers/tcp/lingering_sockets.h"
#include "providers/tcp/link_end.h"
#include "providers/tcp/socket.h"
#include "providers/tcp/tuning.h"

namespace kvc::tcp {

class TcpConnector final : public Connector {
 public:
  static Result<std::unique_ptr<TcpConnector>> open(const DomainConfig& config, const Tuning& tuning);

  std::string description() const override;
  uint64_t bits_per_second() const override { return bits_per_second_; }
  Result<std::unique_ptr<Registration>> register_memory(const MemoryRange& range) override;
  Result<Bytes> offer(LinkId link) override;
  Result<Accepted> accept(LinkId link, std::span<const std::byte> offer) override;
  Result<std::unique_ptr<LinkEnd>> complete(LinkId link, std::span<const std::byte> answer) override;
  void withdraw(LinkId link) override { offers_.erase(link); }
  int fd() const override { return epoll_.fd(); }
  void serve() override;

  // Where the domain's ended connections go, on the control thread.
  const std::shared_ptr<LingeringSockets>& lingering() const noexcept { return lingering_; }

 private:
  using Clock = TimerFd::Clock;

  // An accepted connection that has not proved whose it is.
  struct Stranger : Watched {
    Stranger(UniqueFd accepted, Clock::time_point until)
        : Watched(Kind::kStranger), socket(std::move(accepted)), deadline(until) {}
    UniqueFd socket;
    Clock::time_point deadline;
    std::array<std::byte, sizeof(Hello)> hello{};
    size_t received = 0;
  };

  // A link that peers may dial: until complete() all the connections that were offered, then those that were answered.
  struct Offered {
    Secret dialer;
    Secret listener;
    uint16_t connections = 0;
    uint32_t came = 0;                       // a bit each: the secret opens each connection once
    std::unique_ptr<TcpLinkEnd> end;         // null once complete() has handed it over
    std::weak_ptr<Arrivals> arrivals;        // of that end: gone with the link
    std::optional<Clock::time_point> until;  // since complete()

    bool all_came() const noexcept { return (came | ~0U << connections) == ~0U; }
  };

  TcpConnector(const DomainConfig& config, const Tuning& tuning, Epoll epoll)
      : config_(config), tuning_(tuning), epoll_(std::move(epoll)) {}
  Status start();

  void accept_strangers();
  void hear(Stranger& stranger);
  void dismiss(Stranger& stranger);
  // Takes the socket if the Hello proves that it is one of an offered link's.
  void admit(const Hello& hello, UniqueFd& socket);

  // Deadlines: one timer for the earliest.
  void arm_timer();
  void expire();

  const DomainConfig config_;
  const Tuning tuning_;
  Epoll epoll_;
  UniqueFd listener_;
  uint16_t port_ = 0;
  uint64_t bits_per_second_ = 0;
  Watched listener_watched_{Watched::Kind::kListener};
  TimerFd timer_;
  Watched timer_watched_{Watched::Kind::kTimer};
  std::shared_ptr<LingeringSockets> lingering_;
  Watched lingering_watched_{Watched::Kind::kLingering};
  std::optional<Clock::time_point> listener_paused_until_;  // out of descriptors
  std::map<LinkId, Offered> offers_;
  std::list<Stranger> strangers_;  // oldest first
};

}  // namespace kvc::tcp
