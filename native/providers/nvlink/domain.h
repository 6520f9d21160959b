// NvlinkDomain: the lane between GPUs of one machine. The sender's GPU writes the receiver's pages.
//
// A peer's GPU memory is mapped here through CUDA IPC, once for each allocation, or piece by piece (pieces.h), and one
// kernel on a few SMs copies all the pages of a turn (Copier). wire.h has the shared memory that counts, fences and
// wakes; link.h is one peer; same_host/rendezvous.h is how they meet; here are the regions (domain_memory.cc) and the
// launches. A domain serves one GPU: that of the first memory registered with it.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/copier.h"
#include "engine/domain.h"
#include "providers/nvlink/link.h"
#include "providers/nvlink/peer_memory.h"
#include "providers/nvlink/pieces.h"
#include "providers/nvlink/wire.h"
#include "providers/same_host/region_keys.h"
#include "providers/same_host/rendezvous.h"
#include "providers/same_host/sleep.h"

namespace kvc::nvlink {

// A batch is as many pages as one immediate counts, also large ones (64 of 256 KiB): the batches of one turn go into
// one launch anyway, and each costs the worker a microsecond.
inline constexpr uint64_t kBatchBytes = 16 << 20;
// Four launches of the largest kind: two copy, and two wait behind them on the GPU while others end and are gathered.
// Of the default, 8 MiB, NVLink makes 200 GB/s, because a launch and its completion take as long as they do (measured).
inline constexpr uint64_t kWindowBytes = 4 * cuda::kLaunchBytes;

class NvlinkDomain final : public Domain {
 public:
  // `process`: one number for all domains of this process, and no other's. Tests give two domains two of them, so that
  // they treat each other as strangers.
  NvlinkDomain(const DomainConfig& config, DomainSink& sink, std::optional<uint64_t> process = std::nullopt);
  NvlinkDomain(const NvlinkDomain&) = delete;
  NvlinkDomain& operator=(const NvlinkDomain&) = delete;
  // Revokes every peer's right to write, and waits for our own copies.
  ~NvlinkDomain() override;

  // Once, before anything else: loads the driver, listens, and makes the board. Touches no GPU yet.
  Status open();

  std::string description() const override;
  uint64_t bits_per_second() const override { return 0; }  // one link a peer: nothing to weigh it against
  DomainLimits limits() const override { return {.batch_bytes = kBatchBytes, .window_bytes = kWindowBytes}; }
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
  struct Region {
    uint32_t memory = 0;           // its name, if it is in pieces
    PieceSender::Pieces pieces{};  // or null
    bool revoked = false;
    // Links with batches under way when the region was revoked, and how many had entered then.
    std::vector<std::pair<LinkId, uint64_t>> landing{};
  };
  // How other processes get at a region: by a handle, or in pieces.
  struct Shared {
    cuda::IpcHandle handle{};
    uint64_t offset = 0;  // of the region in what is shared
    PieceSender::Pieces pieces{};
    uint64_t pieces_bytes = 0;
  };
  // A batch in a launch.
  struct Flight {
    LinkId link = 0;
    WorkId work = 0;
    uint32_t immediate = 0;
    bool counted = false;
    std::optional<Error> error{};  // it was refused, and nothing of it copied
    bool completed = false;        // its link ended before the GPU had finished, and the group knows
  };
  // A peer's memory that nobody wants any more.
  struct Retired {
    uint64_t launch = 0;  // the last one that may write there
    std::shared_ptr<PeerAllocation> mapping;
  };
  struct Launch {
    uint64_t number = 0;  // the Copier's; all up to it must have ended
    std::vector<Flight> flights;
  };

  Board& board() const noexcept { return rendezvous_.board<Board>(); }
  Link* find(LinkId link) noexcept;

  Status adopt(int device);
  static Result<Shared> find_allocation(const cuda::Placement& place, const std::byte* base, uint64_t bytes);
  Result<Shared> share_pieces(const std::byte* base, uint64_t bytes) const;
  void tell_memories(Link& link);
  Result<Link::Target> map(const Link& link, const RegionEntry& entry);
  Status reach_gpu(int device) const;
  Status reach_pieces(cuda::DevicePointer base, uint64_t bytes) const;
  Status map_all(Link& link);
  bool move_piece();
  void retire(std::shared_ptr<PeerAllocation> mapping);
  void retire_unused(Link& link);
  bool unmap_retired();

  bool launch();
  bool take(Link& link, Launch& launch);
  bool settle();
  void end(Flight& flight);
  void check_health();
  void close(Link& link, const Error& error);
  void break_down(Link& link, const Error& error);

  void welcome(same_host::Newcomer newcomer);
  void on_event(LinkId id, bool process);
  void reap();

  const uint32_t copy_blocks_;
  const uint64_t process_;
  DomainSink& sink_;
  const cuda::Driver* driver_ = nullptr;
  same_host::Rendezvous rendezvous_;
  same_host::Sleep sleep_;

  std::shared_ptr<cuda::Context> context_;  // null until memory is registered
  PeerMemory peer_memory_;
  same_host::RegionKeys keys_{kLane, kMaxRegions};
  std::unordered_map<uint64_t, Region> regions_;  // by rkey
  uint32_t last_memory_ = 0;

  // A map: a sink may open links while poll() walks over it. Entries only go in reap(). Before the Copier: its
  // destruction waits for copies, whose targets the links keep mapped.
  std::map<LinkId, std::unique_ptr<Link>> links_;
  LinkId last_served_ = 0;
  LinkId last_moved_ = 0;
  std::deque<Retired> retired_;
  std::unique_ptr<cuda::Copier> copier_;
  std::deque<Launch> launches_;
  std::vector<Launch> spare_launches_;  // for the memory of their lists
  std::optional<Error> dead_;           // the GPU's error, after which nothing of this process runs there
  uint32_t turns_ = 0;
};

}  // namespace kvc::nvlink
