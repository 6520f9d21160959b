// The sim domain: delivers every run of pages separately, each after a delay that the seed decides.
//
// It finds errors that a well-behaved fabric hides. One is code that relies on order: pages of a batch, batches of a
// transfer and the links are all reordered. The other is code that reuses source pages early: the source is read when
// the page is delivered, not when it is posted.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "base/timer_fd.h"
#include "lane/domain.h"
#include "lane/region_table.h"
#include "providers/sim/fabric.h"
#include "providers/sim/link.h"

namespace kvc::sim {

class SimDomain final : public Domain {
 public:
  SimDomain(const DomainConfig& config, uint64_t number, std::shared_ptr<Fabric> fabric, std::shared_ptr<Inbox> inbox,
            TimerFd timer, UniqueFd epoll);
  ~SimDomain() override;

  void publish(Registration& region) override { regions_.add(region); }
  bool withdraw(Registration& region) override { return regions_.withdraw(region); }
  void attach(LinkId link, std::unique_ptr<LinkEnd> end) override;
  bool fence(LinkId link) override;
  Posted post(LinkId link, const WriteBatch& batch) override;
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override;
  void take(LinkId link, uint32_t slot) override;
  bool poll() override;
  int fd() const override { return epoll_.get(); }
  bool prepare_sleep() override;

 private:
  // A run of a batch, or a message, that is in flight to this domain.
  struct Arrival {
    int64_t due_ns = 0;
    uint64_t tie = 0;  // random: reorders arrivals with equal delays too (max_delay_us = 0)
    std::shared_ptr<Batch> batch;
    uint32_t run = 0;
    bool later_than(const Arrival& other) const {
      return due_ns != other.due_ns ? due_ns > other.due_ns : tie > other.tie;
    }
  };

  void receive(BatchArrival& arrival);
  void receive(WorkDone& done);
  void receive(LinkClosed& closed);
  static void receive(LinkReady&) {}
  uint64_t deliver(const Arrival& arrival);
  std::optional<Error> copy(const Batch& batch, const PageRun& run);
  void end_posted(Link& link, const Error& error);
  Link* find(LinkId link) noexcept;
  Posted refuse_unknown(WorkId work);
  int64_t due_ns();

  const std::shared_ptr<Fabric> fabric_;
  const std::shared_ptr<Inbox> inbox_;
  TimerFd timer_;
  const UniqueFd epoll_;
  const uint32_t max_delay_us_;
  std::mt19937_64 random_;
  RegionTable regions_;
  std::unordered_map<LinkId, std::unique_ptr<Link>> links_;
  std::vector<Arrival> arrivals_;  // a heap: the first element is the next one due
  std::vector<Message> messages_;  // kept between calls of poll(), which reuses its memory
};

}  // namespace kvc::sim
