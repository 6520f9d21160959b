// VerbsDomain: one port of one RDMA NIC, driven through libibverbs. No thread and no blocking call: everything happens
// in poll().
//
// One completion queue serves all links, so that one call polls them and one arms the wake-up. A link is two reliable
// connected queue pairs; they are connected through the offer and answer of the control plane alone, no datagrams.
// The offering side's hello, the first message on the link, tells the accepting side that it may send.
#pragma once

#include <array>
#include <chrono>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/domain.h"
#include "engine/unique_fd.h"
#include "providers/verbs/device.h"
#include "providers/verbs/link.h"
#include "providers/verbs/receive_queue.h"
#include "providers/verbs/tuning.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs {

using Clock = std::chrono::steady_clock;

class VerbsDomain final : public Domain {
 public:
  static Result<std::unique_ptr<VerbsDomain>> open(const DomainConfig& config, DomainSink& sink, const Library& library,
                                                   const Tuning& tuning);
  // Waits up to close_timeout until the peers of fenced links have heard of it.
  ~VerbsDomain() override;

  std::string description() const override { return "verbs " + shared_.device->description(); }
  uint64_t bits_per_second() const override { return shared_.device->bits_per_second(); }
  Result<uint64_t> register_region(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) override;
  bool deregister_region(uint64_t rkey) override { return shared_.regions.remove(rkey); }
  Result<Bytes> offer(LinkId id) override;
  Result<Bytes> accept(LinkId id, std::span<const std::byte> offer) override;
  Status complete(LinkId id, std::span<const std::byte> answer) override;
  bool fence(LinkId id) override;
  Posted post(LinkId id, const WriteBatch& batch) override;
  Posted send(LinkId id, WorkId work, std::span<const std::byte> message) override;
  bool poll() override;
  int fd() const override { return epoll_.get(); }
  bool prepare_sleep() override;

  // What is held at the moment, for tests: nothing may be left of a link that ended.
  struct Held {
    size_t links, queue_pairs_leaving, regions, credits_used, buffers_used;
  };
  Held held() const noexcept;

 private:
  static constexpr uint32_t kPollBatch = 32;  // completions taken from the queue by one call

  // A link whose end was decided here, kept until the peer has heard of it.
  struct Leaving {
    std::unique_ptr<Link> link;
    Clock::time_point deadline;
  };
  // An accepted link whose peer has not said hello.
  struct Waiting {
    LinkId link;
    Clock::time_point deadline;
  };
  // A message that the sink has no room for yet.
  struct HeldMessage {
    LinkId link;
    uint16_t slot;
    Bytes bytes;
  };

  VerbsDomain(DomainSink& sink, std::unique_ptr<Device> device, const Tuning& tuning);
  Status start();
  Status make_completion_queue();
  Status watch(int fd);

  Link* find(LinkId id) noexcept;
  Link* find_by_number(uint32_t queue_pair) noexcept;
  Result<std::unique_ptr<Link>> make_link(LinkId id);
  void add(std::unique_ptr<Link> link);

  // Takes what is in the completion queue, at most `limit` entries; true if there was anything.
  bool take_completions(uint32_t limit);
  uint32_t poll_completions();
  void handle(const abi::ibv_wc& completion);
  void sent(const WorkRequestId& request, const abi::ibv_wc& completion);
  void write_arrived(uint32_t slot, const abi::ibv_wc& completion);
  void message_arrived(uint32_t slot, const abi::ibv_wc& completion);
  void control_arrived(Link& link, const Control& control, std::span<const std::byte> bytes);
  void took(Link& link, uint16_t slot);
  bool deliver_held();
  bool say_taken();

  // Marks a link as broken: poll() will end it.
  void break_link(Link& link, Error error, std::optional<WorkRequestId> request = std::nullopt);
  bool end_broken();
  // Ends a link now: stops its queue pairs, takes the completions that are there, destroys the queue pairs and
  // completes what was posted. Says goodbye to the peer where that can still be heard.
  void end(Link& link, const Error& error, bool goodbye);

  bool read_completion_event();
  bool read_async_event();
  bool expire();
  void ask_peers();
  void arm_timer();

  DomainSink& sink_;
  Shared shared_;
  UniqueFd epoll_;
  UniqueFd timer_;
  bool timer_armed_ = false;
  Owned<abi::ibv_comp_channel> channel_{nullptr, nullptr};
  Owned<abi::ibv_cq> completions_{nullptr, nullptr};
  std::unique_ptr<ReceiveQueue> write_receives_;
  std::unique_ptr<ReceiveQueue> message_receives_;
  uint32_t credits_ = 0;  // all there are

  std::unordered_map<LinkId, std::unique_ptr<Link>> links_;
  std::unordered_map<uint32_t, Link*> by_number_;  // both queue pairs of each link
  std::vector<Link*> with_rest_;
  std::vector<LinkId> broken_;
  std::list<Leaving> leaving_;
  std::vector<Waiting> waiting_;
  std::vector<HeldMessage> held_;
  std::vector<LinkId> took_;                        // links whose peers have to hear that we took messages of theirs
  std::optional<Error> failed_;                     // the device itself: nothing works any more
  std::optional<Clock::time_point> port_deadline_;  // the port is down: by when it has to be up again

  Clock::time_point ask_at_;  // when idle links ask next whether their peers are there

  bool armed_ = false;           // the next completion will raise an event
  unsigned unacknowledged_ = 0;  // events read and not acknowledged yet
  uint32_t polls_ = 0;
  // Taken from the queue; those from next_completion_ on are not handled yet.
  std::array<abi::ibv_wc, kPollBatch> completion_batch_{};
  uint32_t next_completion_ = 0;
  uint32_t taken_completions_ = 0;
};

}  // namespace kvc::verbs
