// LibfabricDomain: the links of one device, polled. No thread of its own and no blocking call. (Providers that make
// progress by themselves have a thread; none of it is ours.)
#pragma once

#include <map>
#include <memory>

#include "base/timer_fd.h"
#include "base/unique_fd.h"
#include "lane/domain.h"
#include "providers/libfabric/link.h"

namespace kvc::libfabric {

// Both halves. As provider.h's create(), which it is but for the tuning.
Result<OpenedDomain> open(const DomainConfig& config, ControlQueue& control, const Tuning& tuning = {});

class LibfabricDomain final : public Domain {
 public:
  LibfabricDomain(std::shared_ptr<const Device> device, ControlQueue& control, const Tuning& tuning)
      : context_{.device = std::move(device), .control = control, .completions = completions_, .tuning = tuning} {}
  ~LibfabricDomain() override;
  // Before anything else.
  Status start();

  void publish(Registration& region) override { context_.regions.add(region); }
  bool withdraw(Registration& region) override;
  void attach(LinkId id, std::unique_ptr<LinkEnd> end) override;
  bool fence(LinkId id) override;
  Posted post(LinkId id, const WriteBatch& batch) override;
  Posted send(LinkId id, WorkId work, std::span<const std::byte> message) override;
  void take(LinkId id, uint32_t slot) override;
  bool poll() override;
  int fd() const override { return epoll_.get(); }
  bool prepare_sleep() override;

 private:
  Link* find(LinkId id) noexcept;
  bool poll_links();
  void notice_deaths();
  void look_after(Clock::time_point now);

  LinkContext context_;
  UniqueFd epoll_;
  UniqueFd deaths_;  // another one, in it: of the peers' processes
  TimerFd timer_;
  std::map<LinkId, std::unique_ptr<Link>> links_;
  LinkId next_ = 0;     // the link that the next poll() begins with
  bool slept_ = false;  // since the last poll()
  Clock::time_point last_look_ = Clock::now();
  Clock::time_point idle_since_ = last_look_;  // nothing has happened since
};

}  // namespace kvc::libfabric
