// BounceDomain: a lane over another (lower) lane, for memory that the lower lane cannot reach: GPU memory over tcp, or
// over a NIC without access to it.
//
// A batch's pages are gathered in a slot of page-locked host memory here. The lower lane writes it into a slot of the
// peer, which scatters the pages from there. That is two copies and a round trip more than a lane that reaches the
// memory itself. So it is never chosen silently: it is its own provider, whose name appears in every log line and
// metric.
//
//     sender    queue -> [gather: GPU or CPU] -> pool slot -> [lower lane] -> a slot of the link, at the receiver
//     receiver  announced by an immediate -> [scatter: GPU or CPU] -> counted -> note "emptied" -> sender completes
//
// Either side's memory may be a GPU's or the host's, independently. A domain serves one GPU: the GPU of the first such
// memory registered with it. Slots are the credit: a link has kSlots of them at the receiver, a domain kPoolSlots.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "cuda/copy_queue.h"
#include "lane/domain.h"
#include "lane/region_table.h"
#include "providers/bounce/link.h"
#include "providers/bounce/slot_memory.h"
#include "providers/bounce/wire.h"

namespace kvc::bounce {

class BounceDomain final : public Domain {
 public:
  // `below` is the lower lane's domain. `pool` and `control` outlive this object.
  BounceDomain(std::unique_ptr<Domain> below, const SlotMemory& pool, ControlQueue& control);
  ~BounceDomain() override;

  void publish(Registration& registration) override;
  bool withdraw(Registration& registration) override { return regions_.withdraw(registration); }
  void attach(LinkId link, std::unique_ptr<LinkEnd> end) override;
  // Waits, turn by turn, for the link's GPU copies. It also waits a moment for the peer to receive the outcome of what
  // has landed.
  bool fence(LinkId link) override;
  Posted post(LinkId link, const WriteBatch& batch) override;
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override;
  void take(LinkId link, uint32_t slot) override;
  bool poll() override;
  int fd() const override { return below_->fd(); }
  bool prepare_sleep() override;

 private:
  // A copy that the GPU executes.
  struct Flight {
    bool outgoing = false;
    LinkId link = 0;
    uint32_t slot = 0;  // slot of the peer (outgoing), or of the link's own memory
  };
  // The link and slot to which a slot of the pool is written.
  struct PoolUse {
    LinkId link = 0;
    uint32_t slot = 0;  // slot of the peer
  };

  Link* find(LinkId link) noexcept;

  bool take_from_below();
  void on_work(WorkId work, const Error* error);
  void on_immediate(Link& link, uint32_t immediate);

  bool serve(Link& link);
  bool may_gather(const Link& link) const noexcept;
  void gather(Link& link);
  bool write_out(Link& link, uint32_t slot);
  void pass(Link& link, uint32_t slot);
  void scatter(Link& link);
  Outcome judge(const SlotHeader& header, Region*& region) const;
  void scattered(Link& link, uint32_t slot, Outcome outcome);
  bool tell(Link& link);
  bool settle();

  bool heard_out(Link& link);
  void forget(Link& link);

  ControlQueue& control_;
  const SlotMemory& pool_;
  std::vector<uint32_t> pool_free_;
  std::array<PoolUse, kPoolSlots> pool_use_{};

  RegionTable regions_;
  std::map<LinkId, std::unique_ptr<Link>> links_;  // in order of their ids, so that each has its turn
  LinkId last_served_ = 0;
  // slots of links that are gone, still registered with the lower lane
  std::vector<std::shared_ptr<SlotMemory>> ended_;

  std::unordered_map<WorkId, WorkId> messages_;  // the transfer engine's works, by the lower lane's works
  uint64_t next_id_ = 0;
  cuda::CopyQueue<Flight> copies_;
  uint64_t copied_ = 0;  // bytes copied by the processor in this turn
  std::unique_ptr<Domain> below_;
};

}  // namespace kvc::bounce
