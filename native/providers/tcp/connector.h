// TcpConnector: the listening socket, the strangers (accepted connections without proof), the offers with their
// secrets, and dialling. It has its own epoll instance, so that a flood of connects costs the control thread's time and
// no transfer's.
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

  // The sockets that the domain's connections leave behind when they end. Used on the control thread.
  const std::shared_ptr<LingeringSockets>& lingering() const noexcept { return lingering_; }

 private:
  using Clock = TimerFd::Clock;

  // An accepted connection that has not proved which link it belongs to.
  struct Stranger : Watched {
    Stranger(UniqueFd accepted, Clock::time_point until)
        : Watched(Kind::kStranger), socket(std::move(accepted)), deadline(until) {}
    UniqueFd socket;
    Clock::time_point deadline;
    std::array<std::byte, sizeof(Hello)> hello{};
    size_t received = 0;
  };

  // A link that peers may dial. `connections` counts the offered ones until complete(), and the answered ones after it.
  struct Offered {
    Secret dialer;
    Secret listener;
    uint16_t connections = 0;
    uint32_t came = 0;                       // a bit per connection: the secret opens each connection once
    std::unique_ptr<TcpLinkEnd> end;         // null once complete() has handed it over
    std::weak_ptr<Arrivals> arrivals;        // of `end`; expires with the link
    std::optional<Clock::time_point> until;  // set by complete()

    bool all_came() const noexcept { return (came | ~0U << connections) == ~0U; }
  };

  TcpConnector(const DomainConfig& config, const Tuning& tuning, Epoll epoll)
      : config_(config), tuning_(tuning), epoll_(std::move(epoll)) {}
  Status start();

  void accept_strangers();
  void hear(Stranger& stranger);
  void dismiss(Stranger& stranger);
  // Takes the socket if the Hello proves that it belongs to an offered link.
  void admit(const Hello& hello, UniqueFd& socket);

  // Deadlines. One timer serves the earliest.
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
  std::optional<Clock::time_point> listener_paused_until_;  // set when the process is out of descriptors
  std::map<LinkId, Offered> offers_;
  std::list<Stranger> strangers_;  // oldest first
};

}  // namespace kvc::tcp
