// TcpDomain: one epoll instance and the links to peers. It has no thread and makes no blocking call: everything happens
// in poll().
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/timer_fd.h"
#include "lane/domain.h"
#include "providers/tcp/connection.h"
#include "providers/tcp/link.h"
#include "providers/tcp/socket.h"
#include "providers/tcp/tuning.h"

namespace kvc::tcp {

class TcpDomain final : public Domain {
 public:
  // Opens the domain. `address` is the local address and only used in errors. `control` outlives the domain.
  static Result<std::unique_ptr<TcpDomain>> open(const std::string& address, ControlQueue& control,
                                                 std::shared_ptr<LingeringSockets> lingering, const Tuning& tuning);

  void publish(Registration& region) override { context_.regions.add(region); }
  bool withdraw(Registration& region) override { return context_.regions.withdraw(region); }
  void attach(LinkId id, std::unique_ptr<LinkEnd> end) override;
  bool fence(LinkId id) override;
  Posted post(LinkId id, const WriteBatch& batch) override;
  Posted send(LinkId id, WorkId work, std::span<const std::byte> message) override;
  void take(LinkId id, uint32_t slot) override;
  bool poll() override;
  int fd() const override { return context_.epoll.fd(); }
  bool prepare_sleep() override { return context_.sendable.empty(); }

 private:
  TcpDomain(const std::string& address, ControlQueue& control, std::shared_ptr<LingeringSockets> lingering,
            const Tuning& tuning, Epoll epoll, TimerFd timer);

  Link* find(LinkId id) noexcept;
  // Begins the end of a link after an error. report() follows once the peer's last bytes have been read.
  void fail(Link& link, const Error& error);
  void report(Link& link);

  // Deadlines. One timer serves the earliest.
  void arm_timer();
  void expire();

  const std::string address_;
  LinkContext context_;  // before the members that use it
  TimerFd timer_;
  Watched timer_watched_{Watched::Kind::kTimer};
  std::map<LinkId, std::unique_ptr<Link>> links_;
};

}  // namespace kvc::tcp
