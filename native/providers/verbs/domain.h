// VerbsDomain: what is posted on and polled from one port of one RDMA NIC, through libibverbs.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/timer_fd.h"
#include "base/unique_fd.h"
#include "lane/domain.h"
#include "providers/verbs/device_events.h"
#include "providers/verbs/link.h"
#include "providers/verbs/links.h"
#include "providers/verbs/queues.h"

namespace kvc::verbs {

class VerbsDomain final : public Domain {
 public:
  // Both outlive it. Any thread; does not block.
  static Result<std::unique_ptr<Domain>> create(Queues& queues, ControlQueue& control);
  // Waits up to close_timeout until the peers of fenced links have heard of it.
  ~VerbsDomain() override;

  // Peers write by the NIC's own keys: it learns of a region when that is registered, and refuses its key from the
  // registration's end on (~MemoryRegistration). Here is nothing to know and nothing to wait for.
  void publish(Registration& /*region*/) override {}
  bool withdraw(Registration& /*region*/) override { return true; }

  // Before the peer hears how to reach this end: what comes over an unknown queue pair is nobody's.
  void attach(LinkId id, std::unique_ptr<LinkEnd> end) override;
  bool fence(LinkId id) override;
  Posted post(LinkId id, const WriteBatch& batch) override;
  Posted send(LinkId id, WorkId work, std::span<const std::byte> message) override;
  void take(LinkId id, uint32_t slot) override;
  bool poll() override;
  int fd() const override { return epoll_.get(); }
  bool prepare_sleep() override;

  // What is held at the moment, for tests: nothing may be left of a link that ended.
  struct Held {
    size_t links, credits_used, buffers_used;
  };
  Held held() const noexcept;

 private:
  // An accepted link whose peer has not said hello.
  struct Waiting {
    LinkId link;
    Clock::time_point deadline;
  };

  VerbsDomain(Queues& queues, ControlQueue& control, UniqueFd epoll, TimerFd timer);

  // A link that the engine has not fenced; null: there is none.
  Link* find(LinkId id) const noexcept;

  // Takes what is in the completion queue, at most `limit` entries and a few; true if there was anything.
  bool take_completions(uint32_t limit);
  void handle(const abi::ibv_wc& completion);
  void sent(const WorkRequestId& request, const abi::ibv_wc& completion);
  void received(const WorkRequestId& request, const abi::ibv_wc& completion);
  void write_arrived(Link& link, const abi::ibv_wc& completion);
  void message_arrived(Link& link, const abi::ibv_wc& completion, std::span<const std::byte> bytes);
  // False: the peer has no right to say that.
  bool hear(Link& link, const Control& control, std::span<const std::byte> bytes);

  // The steps of a turn; each is true if anything happened.
  bool say_owed();        // to peers that have to hear something
  bool continue_rests();  // of batches that their queues had no room for
  bool read_events();     // of the device
  bool step_ends();       // of links that end
  bool expire();          // deadlines that are the domain's own
  void ask_peers();       // whether they are there, each ask_interval

  // Ends a link that broke. The engine is told once all that was posted on it has completed.
  void break_link(Link& link, const Error& why, bool goodbye = true);
  void end(Link& link, const Error& why, bool goodbye);
  // If a queue pair took no more, that is the end of its link.
  void check(Link& link);
  std::optional<Clock::time_point> next_deadline() const;

  LinkContext context_;
  const UniqueFd epoll_;
  TimerFd timer_;
  Links links_;
  std::vector<Link*> with_rest_;
  std::vector<Link*> owing_;   // whose peers have to hear something
  std::vector<Link*> ending_;  // until nothing is left of them
  std::vector<Waiting> waiting_;
  std::optional<Clock::time_point> port_deadline_;  // the port is down: by when it has to be up again
  Clock::time_point ask_at_;                        // when idle links ask next whether their peers are there
  uint32_t polls_ = 0;
};

}  // namespace kvc::verbs
