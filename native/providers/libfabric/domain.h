// LibfabricDomain: the links of one device, polled. It has no thread and makes no blocking call. Providers
// that make progress by themselves have their own thread, which is not ours.
#pragma once

#include <map>
#include <memory>

#include "base/timer_fd.h"
#include "base/unique_fd.h"
#include "lane/domain.h"
#include "providers/libfabric/link.h"

namespace kvc::libfabric {

// Opens both halves. As create() in provider.h, with the caller's tuning.
Result<OpenedDomain> open(const DomainConfig& config, ControlQueue& control, const Tuning& tuning = {});

class LibfabricDomain final : public Domain {
 public:
  LibfabricDomain(std::shared_ptr<const Device> device, ControlQueue& control, const Tuning& tuning)
      : context_{.device = std::move(device), .control = control, .completions = completions_, .tuning = tuning} {}
  ~LibfabricDomain() override;
  // Call it before anything else.
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
  UniqueFd deaths_;  // a second epoll instance within `epoll_`, for the peers' processes
  TimerFd timer_;
  std::map<LinkId, std::unique_ptr<Link>> links_;
  LinkId next_ = 0;     // the link with which the next poll() begins
  bool slept_ = false;  // whether the thread has slept since the last poll()
  Clock::time_point last_look_ = Clock::now();
  Clock::time_point idle_since_ = last_look_;  // nothing has happened since
};

}  // namespace kvc::libfabric
