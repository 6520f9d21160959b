// NvlinkConnector: the control half of the nvlink lane, between GPUs of one machine. It registers memory, makes the
// connections over which the domain (domain.h) writes, and maps the regions that the peers have registered by then.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "cuda/copy_queue.h"
#include "lane/domain.h"
#include "providers/nvlink/link.h"
#include "providers/nvlink/peer_memory.h"
#include "providers/nvlink/region.h"
#include "providers/nvlink/wire.h"
#include "providers/same_host/region_keys.h"
#include "providers/same_host/rendezvous.h"

namespace kvc::nvlink {

// A batch has as many pages as one immediate counts, also for large pages (64 of 256 KiB). The batches of one turn go
// into one launch anyway, and each costs the domain a microsecond.
inline constexpr uint64_t kBatchBytes = 16 << 20;
// Four launches of the largest kind. Two copy, and two wait behind them on the GPU while others end and are gathered.
// With the default, 8 MiB, NVLink reaches 200 GB/s only, because a launch and its completion take their time
// (measured).
inline constexpr uint64_t kWindowBytes = 4 * cuda::kLaunchBytes;

class NvlinkConnector final : public Connector {
 public:
  // `process` is one number for all domains of this process, which no other process has. Tests give two domains
  // different numbers, so that they treat each other as strangers.
  explicit NvlinkConnector(const DomainConfig& config, std::optional<uint64_t> process = std::nullopt);

  // Loads the driver, listens, and makes the board. Call it once, before anything else. It touches no GPU yet.
  Status open();
  // The board, which the domain writes. Valid as long as this object.
  Board& board() const noexcept { return rendezvous_.board<Board>(); }
  const cuda::Driver& driver() const noexcept { return *driver_; }

  std::string description() const override;
  DomainLimits limits() const override { return {.batch_bytes = kBatchBytes, .window_bytes = kWindowBytes}; }
  Result<std::unique_ptr<Registration>> register_memory(const MemoryRange& range) override;
  Result<Bytes> offer(LinkId link) override;
  Result<Accepted> accept(LinkId link, std::span<const std::byte> offer) override;
  Result<std::unique_ptr<LinkEnd>> complete(LinkId link, std::span<const std::byte> answer) override;
  void withdraw(LinkId link) override { rendezvous_.withdraw(link); }
  int fd() const override { return rendezvous_.fd(); }
  void serve() override { rendezvous_.serve(); }

 private:
  Result<Shared> share(const cuda::Placement& place, const MemoryRange& range) const;
  Result<Shared> share_pieces(const MemoryRange& range) const;
  Status check_gpu(std::string_view operation) const;
  // Null until memory is registered. Any thread.
  std::shared_ptr<PeerMemory> peer_memory() const;
  // Whether the peer is a domain of this process, even if it lies about the mark.
  bool is_ours(const Connection& peer, uint64_t mark) const;
  void send_ahead(Meeting& meeting) const;
  Status map_known(Meeting& meeting) const;

  const uint64_t process_;
  const cuda::Driver* driver_ = nullptr;
  same_host::Rendezvous rendezvous_{kLane};
  same_host::RegionKeys keys_{kLane, kMaxRegions};
  cuda::DomainGpu gpu_;  // used on the memory thread
  // A mutex, because the libc++ of the wheels has no atomic std::shared_ptr. The memory thread sets it once.
  mutable std::mutex peer_memory_mutex_;
  std::shared_ptr<PeerMemory> peer_memory_;
  Region::Registry pieced_;
};

}  // namespace kvc::nvlink
