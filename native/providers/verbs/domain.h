// VerbsDomain: posts on and polls one port of one RDMA NIC, through libibverbs.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/timer_fd.h"
#include "base/unique_fd.h"
#include "lane/domain.h"
#include "providers/verbs/device_events.h"
#include "providers/verbs/domain_resources.h"
#include "providers/verbs/link.h"
#include "providers/verbs/links.h"

namespace kvc::verbs {

class VerbsDomain final : public Domain {
 public:
  // Creates the domain. `resources` and `control` outlive it. Any thread may call it; it does not block.
  static Result<std::unique_ptr<Domain>> create(DomainResources& resources, ControlQueue& control);
  // Waits up to close_timeout until the peers of fenced links have received the goodbye.
  ~VerbsDomain() override;

  // Peers write with the NIC's own keys. The NIC knows a region once that is registered, and refuses its key once the
  // registration is destroyed (~MemoryRegistration). So nothing has to be recorded or awaited here.
  void publish(Registration& /*region*/) override {}
  bool withdraw(Registration& /*region*/) override { return true; }

  // Must be called before the peer learns how to reach this end: completions of an unknown queue pair are dropped.
  void attach(LinkId id, std::unique_ptr<LinkEnd> end) override;
  bool fence(LinkId id) override;
  Posted post(LinkId id, const WriteBatch& batch) override;
  Posted send(LinkId id, WorkId work, std::span<const std::byte> message) override;
  void take(LinkId id, uint32_t slot) override;
  bool poll() override;
  int fd() const override { return epoll_.get(); }
  bool prepare_sleep() override;

  // Counts of what is held at the moment, for tests: nothing may be left of a link that ended.
  struct Held {
    size_t links, credits_used, buffers_used;
  };
  Held held() const noexcept;

 private:
  // An accepted link whose peer has not sent its hello.
  struct Waiting {
    LinkId link;
    Clock::time_point deadline;
  };

  VerbsDomain(DomainResources& resources, ControlQueue& control, UniqueFd epoll, TimerFd timer);

  // Returns a link that the transfer engine has not fenced, or null.
  Link* find(LinkId id) const noexcept;

  // Handles entries of the completion queue: at most `limit`, rounded up to a batch. Returns true if there were any.
  bool take_completions(uint32_t limit);
  void handle(const abi::ibv_wc& completion);
  void sent(const WorkRequestId& request, const abi::ibv_wc& completion);
  void received(const WorkRequestId& request, const abi::ibv_wc& completion);
  void write_arrived(Link& link, const abi::ibv_wc& completion);
  void message_arrived(Link& link, const abi::ibv_wc& completion, std::span<const std::byte> bytes);
  // Handles a control message. Returns false if the peer may not send it now.
  bool hear(Link& link, const Control& control, std::span<const std::byte> bytes);

  // The steps of a turn. Each returns true if anything happened.
  bool say_owed();        // sends the hellos and acknowledgements that are due
  bool continue_rests();  // posts the rest of batches for which their queues had no room
  bool read_events();     // reads the device's events
  bool step_ends();       // continues the ends of links
  bool expire();          // checks the domain's own deadlines
  void ask_peers();       // checks whether the peers are alive, each ask_interval

  // Ends a link that broke. The link is reported down once all that was posted on it has completed.
  void break_link(Link& link, const Error& why, bool goodbye = true);
  void end(Link& link, const Error& why, bool goodbye);
  // Ends the link if one of its queue pairs refused a post.
  void check(Link& link);
  std::optional<Clock::time_point> next_deadline() const;

  LinkContext context_;
  const UniqueFd epoll_;
  TimerFd timer_;
  Links links_;
  std::vector<Link*> with_rest_;
  std::vector<Link*> owing_;   // links with a hello or acknowledgement to send
  std::vector<Link*> ending_;  // until nothing is left of them
  std::vector<Waiting> waiting_;
  // set while the port is down: the time by which it has to be up again
  std::optional<Clock::time_point> port_deadline_;
  Clock::time_point ask_at_;  // the time of the next check of idle links' peers
  uint32_t polls_ = 0;
};

}  // namespace kvc::verbs
