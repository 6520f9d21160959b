// TcpDomain: one epoll instance and the links to peers. No thread and no blocking call: everything happens in poll().
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
  // `address`: the local one, for errors. `control` outlives the domain.
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
  // Something of the link went wrong: its end begins, and is reported once the peer has been heard out.
  void fail(Link& link, const Error& error);
  void report(Link& link);

  // Deadlines: one timer for the earliest.
  void arm_timer();
  void expire();

  const std::string address_;
  LinkContext context_;  // before what uses it
  TimerFd timer_;
  Watched timer_watched_{Watched::Kind::kTimer};
  std::map<LinkId, std::unique_ptr<Link>> links_;
};

}  // namespace kvc::tcp
