// HostDomain: the lane between processes of one machine. The sender's processor writes the receiver's pages.
//
// A peer's region in a memfd is mapped and copied into; one in private memory is written with process_vm_writev.
// wire.h has the shared memory that counts, fences and wakes; link.h is one peer; same_host/rendezvous.h is how they
// meet; here are the regions, and the turns of the worker.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/domain.h"
#include "engine/unique_fd.h"
#include "providers/host/link.h"
#include "providers/host/wire.h"
#include "providers/same_host/region_keys.h"
#include "providers/same_host/rendezvous.h"
#include "providers/same_host/sleep.h"

namespace kvc::host {

class HostDomain final : public Domain {
 public:
  explicit HostDomain(DomainSink& sink)
      : sink_(sink), rendezvous_(kLane, [this](same_host::Newcomer newcomer) { welcome(std::move(newcomer)); }) {}
  HostDomain(const HostDomain&) = delete;
  HostDomain& operator=(const HostDomain&) = delete;
  // Revokes every peer's right to write; whoever has to be sure that none is inside its gate calls fence() before.
  ~HostDomain() override;

  // Once, before anything else: listens, and makes the board.
  Status open();

  std::string description() const override;
  uint64_t bits_per_second() const override { return 0; }  // the machine's memory: nothing to weigh it against
  Result<uint64_t> register_region(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) override;
  bool deregister_region(uint64_t rkey) override;
  Result<Bytes> offer(LinkId link) override;
  Result<Bytes> accept(LinkId link, std::span<const std::byte> offer) override;
  Status complete(LinkId link, std::span<const std::byte> answer) override;
  bool fence(LinkId link) override;
  Posted post(LinkId link, const WriteBatch& batch) override;
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override;
  bool poll() override;
  int fd() const override { return rendezvous_.epoll(); }
  bool prepare_sleep() override;

 private:
  // A memfd with regions in it. Known to peers by a number that is never used again.
  struct Memory {
    UniqueFd fd;
    uint64_t device = 0;
    uint64_t inode = 0;
    uint64_t bytes = 0;
    uint32_t regions = 0;
  };
  struct Region {
    uint32_t memory = 0;  // 0: private memory
    bool revoked = false;
    // Links whose peer was inside its gate when the region was revoked, and the gate's word then.
    std::vector<std::pair<LinkId, uint64_t>> inside;
  };

  Board& board() const noexcept { return rendezvous_.board<Board>(); }
  Probe probe() const noexcept;
  Link* find(LinkId link) noexcept;
  Result<uint32_t> share(int memfd, uint64_t offset, uint64_t bytes);
  void unshare(uint32_t memory);
  void send_memories(Link& link);

  void welcome(same_host::Newcomer newcomer);
  void on_event(LinkId id, bool process);
  void reap();

  DomainSink& sink_;
  same_host::Rendezvous rendezvous_;
  same_host::Sleep sleep_;
  uint64_t probe_word_ = 0;  // what Probe speaks of

  same_host::RegionKeys keys_{kLane, kMaxRegions};
  std::unordered_map<uint64_t, Region> regions_;  // by rkey
  std::map<uint32_t, Memory> memories_;
  uint32_t last_memory_ = 0;
  uint32_t private_regions_ = 0;

  // A map: a sink may open links while poll() walks over it. Entries only go in reap().
  std::map<LinkId, std::unique_ptr<Link>> links_;
  LinkId last_served_ = 0;
};

}  // namespace kvc::host
