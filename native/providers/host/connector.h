// HostConnector: the control half of the host lane, between processes of one machine. It registers memory and makes the
// connections over which the domain (domain.h) writes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "lane/domain.h"
#include "providers/host/memory.h"
#include "providers/host/wire.h"
#include "providers/same_host/region_keys.h"
#include "providers/same_host/rendezvous.h"

namespace kvc::host {

class HostConnector final : public Connector {
 public:
  // Listens and makes the board. Call it once, before anything else.
  Status open();
  // The board, which the domain writes. Valid as long as this object.
  Board& board() const noexcept { return rendezvous_.board<Board>(); }

  std::string description() const override;
  // Registers the range. A memfd is sealed against shrinking, and one descriptor of it is kept until the end of its
  // last region.
  Result<std::unique_ptr<Registration>> register_memory(const MemoryRange& range) override;
  Result<Bytes> offer(LinkId link) override;
  Result<Accepted> accept(LinkId link, std::span<const std::byte> offer) override;
  Result<std::unique_ptr<LinkEnd>> complete(LinkId link, std::span<const std::byte> answer) override;
  void withdraw(LinkId link) override { rendezvous_.withdraw(link); }
  int fd() const override { return rendezvous_.fd(); }
  void serve() override { rendezvous_.serve(); }

 private:
  Result<std::shared_ptr<Memory>> share(const MemoryRange& range);
  Probe probe() const noexcept;

  same_host::Rendezvous rendezvous_{kLane};
  uint64_t probe_word_ = 0;  // the word to which Probe::address points

  same_host::RegionKeys keys_{kLane, kMaxRegions};
  const std::shared_ptr<Memory> private_memory_ = std::make_shared<Memory>();
  std::map<std::pair<uint64_t, uint64_t>, std::weak_ptr<Memory>> memfds_;  // by device and inode
};

}  // namespace kvc::host
