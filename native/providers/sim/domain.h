// The sim domain: delivers every run of pages separately, each after a delay that the seed decides.
//
// It finds what a kind fabric hides: code that relies on order (pages of a batch, batches of a transfer and links
// among each other are all reordered), and code that reuses source pages early (the source is read when the page is
// delivered, not when it is posted).
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "engine/domain.h"
#include "providers/sim/fabric.h"
#include "providers/sim/link.h"

namespace kvc::sim {

class SimDomain final : public Domain {
 public:
  SimDomain(const DomainConfig& config, DomainSink& sink, std::shared_ptr<Inbox> inbox, UniqueFd timer, UniqueFd epoll);
  ~SimDomain() override;

  std::string description() const override;
  uint64_t bits_per_second() const override { return nic_->bits_per_second.load(); }
  Result<uint64_t> register_region(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) override;
  bool deregister_region(uint64_t rkey) override;
  Result<Bytes> offer(LinkId link) override;
  Result<Bytes> accept(LinkId link, std::span<const std::byte> offer) override;
  Status complete(LinkId link, std::span<const std::byte> answer) override;
  bool fence(LinkId link) override;
  Posted post(LinkId link, const WriteBatch& batch) override;
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override;
  bool poll() override;
  int fd() const override { return epoll_.get(); }
  bool prepare_sleep() override;

 private:
  struct Region {
    std::byte* base = nullptr;
    uint64_t bytes = 0;
  };

  struct PageArrival {
    std::shared_ptr<Batch> batch;
    PageRun run;
  };
  using Arrived = std::variant<PageArrival, MessageArrival>;
  struct Arrival {
    int64_t due_ns = 0;
    uint64_t tie = 0;  // random: reorders also where the delays are equal (max_delay_us = 0)
    Arrived what;
    bool later_than(const Arrival& other) const {
      return due_ns != other.due_ns ? due_ns > other.due_ns : tie > other.tie;
    }
  };

  void receive(const BatchArrival& arrival);
  void receive(MessageArrival message);
  void add_arrival(int64_t due_ns, Arrived what);
  Arrived take_arrival();
  void receive(BatchDone done);
  void receive(LinkClosed closed);
  void deliver(const PageArrival& page);
  bool deliver(const MessageArrival& message);
  bool deliver_held();
  Link* ready_link(LinkId id, WorkId work);
  std::optional<Error> copy(const PageArrival& page);
  void end_link(Link& link);
  int64_t delay_ns();

  const std::string name_;  // "default/3"
  const std::shared_ptr<Fabric> fabric_;
  const uint64_t number_;  // in the fabric
  const std::shared_ptr<Nic> nic_;
  DomainSink& sink_;
  const std::shared_ptr<Inbox> inbox_;
  const UniqueFd timer_;
  int64_t timer_due_ns_ = 0;  // what the timer is set to; 0: not set, and not readable
  const UniqueFd epoll_;
  const uint32_t max_delay_us_;
  std::mt19937_64 random_;
  std::unordered_map<uint64_t, Region> regions_;  // by rkey
  std::unordered_map<LinkId, Link> links_;
  std::vector<Arrival> arrivals_;   // a heap: the next one due is in front
  std::list<MessageArrival> held_;  // due, and refused by the sink: offered again at each poll()
};

}  // namespace kvc::sim
