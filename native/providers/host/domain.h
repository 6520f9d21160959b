// HostDomain: the data half of the host lane, between processes of one machine. The sender's processor writes the
// receiver's pages.
//
// A peer's region in a memfd is mapped and copied into. A region in private memory is written with process_vm_writev.
// wire.h describes the shared memory that counts, fences and wakes. link.h is the link to one peer, and connector.h
// makes the connections. This file has the regions and the thread's turns.
#pragma once

#include <map>
#include <memory>
#include <span>

#include "lane/domain.h"
#include "providers/host/link.h"
#include "providers/host/memory.h"
#include "providers/host/wire.h"
#include "providers/same_host/link_events.h"
#include "providers/same_host/sleep.h"

namespace kvc::host {

class HostDomain final : public Domain {
 public:
  // `board` belongs to the connector. It and `control` outlive this object.
  HostDomain(Board& board, ControlQueue& control) : control_(control), board_(board), sleep_(board.sleep) {}
  // Revokes every peer's right to write. To be sure that no peer is inside its gate, call fence() before.
  ~HostDomain() override;

  // Call it once, before anything else.
  Status open() { return events_.open(kLane); }

  void publish(Registration& registration) override;
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
  bool look();

  ControlQueue& control_;
  Board& board_;
  same_host::Sleep sleep_;
  same_host::LinkEvents events_;
  Memories memories_;
  std::map<LinkId, std::unique_ptr<Link>> links_;  // in order of their ids, so that each has its turn
  LinkId last_served_ = 0;
};

}  // namespace kvc::host
