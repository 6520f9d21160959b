// NvlinkDomain: the data half of the nvlink lane, between GPUs of one machine. The sender's GPU writes the receiver's
// pages.
//
// A peer's GPU memory is mapped here through CUDA IPC, once for each allocation, or piece by piece (peer_regions.h).
// One kernel on a few SMs copies all the pages of a turn (cuda/copier.h). wire.h describes the shared memory that
// counts, fences and wakes. link.h is the link to one peer, and connector.h makes the connections. This file has the
// regions, the launches, and the thread's turns. A domain serves one GPU: the GPU of the first memory registered with
// it.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "cuda/copy_queue.h"
#include "lane/domain.h"
#include "providers/nvlink/link.h"
#include "providers/nvlink/region.h"
#include "providers/nvlink/wire.h"
#include "providers/same_host/link_events.h"
#include "providers/same_host/sleep.h"

namespace kvc::nvlink {

class NvlinkDomain final : public Domain {
 public:
  // `board` belongs to the connector. It, `driver` and `control` outlive this object.
  NvlinkDomain(Board& board, const cuda::Driver& driver, ControlQueue& control)
      : control_(control), driver_(driver), board_(board), sleep_(board.sleep) {}
  // Revokes every peer's right to write. To be sure that nothing lands, call fence() before. Copies of this side that
  // are in flight keep what they need until they have ended.
  ~NvlinkDomain() override;

  // Call it once, before anything else.
  Status open() { return events_.open(kLane); }

  void publish(Registration& registration) override;
  // Returns false until no copy of a peer can land there any more and every peer has unmapped the region.
  bool withdraw(Registration& registration) override;
  void attach(LinkId link, std::unique_ptr<LinkEnd> end) override;
  bool fence(LinkId link) override;
  Posted post(LinkId link, const WriteBatch& batch) override;
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override;
  void take(LinkId link, uint32_t slot) override;
  bool poll() override;
  int fd() const override { return events_.fd(); }
  bool prepare_sleep() override;

 private:
  Link* find(LinkId link) noexcept;
  bool settle();
  bool launch();
  void on_event(LinkId link, bool process);
  void reap();

  ControlQueue& control_;
  const cuda::Driver& driver_;
  Board& board_;
  same_host::Sleep sleep_;
  same_host::LinkEvents events_;
  Link::Regions regions_;  // by place, without revoked ones
  Copies copies_;
  std::vector<Flight> gathered_;  // for the next launch; kept to reuse its memory
  // in order of their ids, so that each has its turn; also fenced links until over()
  std::map<LinkId, std::unique_ptr<Link>> links_;
  LinkId last_served_ = 0;
};

}  // namespace kvc::nvlink
