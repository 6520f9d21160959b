// NvlinkDomain's regions, and its peers' regions as they are mapped here.
#include <algorithm>
#include <string>
#include <utility>

#include "providers/nvlink/domain.h"

namespace kvc::nvlink {

// --- Our own

// Makes `device` the domain's GPU, if it has none yet.
Status NvlinkDomain::adopt(int device) {
  if (context_ != nullptr) {
    if (context_->device() == device) return {};
    return kLane.error(ErrorCode::kInvalidArgument, "register_region",
                       "this memory is on GPU " + std::to_string(device) + ", and earlier regions on GPU " +
                           std::to_string(context_->device()) + ": one engine serves one GPU");
  }
  Result<std::shared_ptr<cuda::Context>> context = cuda::Context::retain(device);
  if (!context) return kLane.named(context.error());
  Result<std::unique_ptr<cuda::Copier>> copier = cuda::Copier::open(context.value(), copy_blocks_);
  if (!copier) return kLane.named(copier.error());
  context_ = std::move(context.value());
  copier_ = std::move(copier.value());
  return {};
}

Result<uint64_t> NvlinkDomain::register_region(std::byte* base, uint64_t bytes, int, uint64_t) {
  if (Status possible = keys_.check(base, bytes); !possible) return possible.error();
  Result<cuda::Placement> placed = cuda::placement(*driver_, base);
  if (!placed) return kLane.named(placed.error());
  const cuda::Placement& place = placed.value();
  if (place.device < 0) {
    return kLane.error(ErrorCode::kInvalidArgument, "register_region",
                       "this memory is in no GPU: the nvlink lane moves GPU memory only (host, tcp: the other kind)");
  }
  Result<Shared> shared = place.ipc_capable ? find_allocation(place, base, bytes) : share_pieces(base, bytes);
  if (!shared) return shared.error();
  if (Status adopted = adopt(place.device); !adopted) return adopted.error();
  if (place.ipc_capable) {
    const cuda::Context::Scope scope(*context_);
    if (int result = driver_->cuIpcGetMemHandle(&shared.value().handle, place.allocation); result != cuda::kSuccess) {
      Error error = kLane.named(cuda::cuda_error("register_region", "cuIpcGetMemHandle", result));
      error.code = ErrorCode::kRefused;
      return error;
    }
  }
  Result<uint64_t> taken = keys_.take();
  if (!taken) return taken;
  const uint64_t rkey = taken.value();
  Region& region = regions_[rkey];
  region.pieces = std::move(shared.value().pieces);
  if (region.pieces) region.memory = ++last_memory_;
  RegionEntry& entry = board().regions[keys_.place(rkey)];
  entry.base.store(reinterpret_cast<uint64_t>(base), std::memory_order_relaxed);
  entry.length.store(bytes, std::memory_order_relaxed);
  entry.offset.store(shared.value().offset, std::memory_order_relaxed);
  entry.device.store(static_cast<uint64_t>(place.device), std::memory_order_relaxed);
  entry.memory.store(region.memory, std::memory_order_relaxed);
  entry.pieces_bytes.store(shared.value().pieces_bytes, std::memory_order_relaxed);
  entry.allocation = shared.value().handle;
  entry.rkey.store(rkey, std::memory_order_release);
  for (const auto& [id, link] : links_) {
    if (region.pieces && link->attached()) link->tell_memory(region.memory, region.pieces);
  }
  return rkey;
}

// One allocation, which CUDA IPC can name to other processes.
Result<NvlinkDomain::Shared> NvlinkDomain::find_allocation(const cuda::Placement& place, const std::byte* base,
                                                           uint64_t bytes) {
  const uint64_t offset = reinterpret_cast<uint64_t>(base) - place.allocation;
  if (bytes > place.allocation_bytes || offset > place.allocation_bytes - bytes) {
    return kLane.error(ErrorCode::kRefused, "register_region",
                       "the region spans several allocations: register each as a region of its own");
  }
  return Shared{.offset = offset};
}

// Pieces, whose descriptors the links carry. They are exported as they are sent: here it shows whether they can be.
Result<NvlinkDomain::Shared> NvlinkDomain::share_pieces(const std::byte* base, uint64_t bytes) const {
  const auto address = reinterpret_cast<uint64_t>(base);
  Result<std::vector<cuda::Piece>> pieces = cuda::pieces_of(*driver_, address, bytes);
  Status exported;
  if (pieces) {
    if (Result<UniqueFd> first = cuda::export_piece(*driver_, pieces.value().front().address); !first) {
      exported = first.error();
      exported.error().code = ErrorCode::kRefused;
    }
  }
  if (!pieces || !exported) {
    Error error = kLane.named(pieces ? exported.error() : pieces.error());
    if (error.code == ErrorCode::kRefused) {
      error.message +=
          ": turn off what places it so, as vLLM's sleep mode does, and PYTORCH_CUDA_ALLOC_CONF=expandable_segments "
          "before PyTorch 2.5";
    }
    return error;
  }
  Shared shared;
  shared.offset = address - pieces.value().front().address;
  for (const cuda::Piece& piece : pieces.value()) shared.pieces_bytes += piece.bytes;
  shared.pieces = std::make_shared<const std::vector<cuda::Piece>>(std::move(pieces.value()));
  return shared;
}

void NvlinkDomain::tell_memories(Link& link) {
  for (const auto& [rkey, region] : regions_) {
    if (region.pieces && !region.revoked) link.tell_memory(region.memory, region.pieces);
  }
}

bool NvlinkDomain::deregister_region(uint64_t rkey) {
  const auto found = regions_.find(rkey);
  if (found == regions_.end()) return true;
  Region& region = found->second;
  if (!region.revoked) {
    region.revoked = true;
    board().regions[keys_.place(rkey)].rkey.store(0, std::memory_order_seq_cst);
    for (const auto& [id, link] : links_) {
      region.landing.emplace_back(id, link->peer_entered());
      if (region.pieces && link->attached()) link->forget_memory(region.memory);
    }
  }
  std::erase_if(region.landing, [this](const auto& entry) {
    const Link* link = find(entry.first);
    return link == nullptr || link->peer_left(entry.second);
  });
  if (!region.landing.empty()) return false;
  regions_.erase(found);
  keys_.give_back(rkey);
  return true;
}

// --- The peers'

// Where a peer's region lies in this process's address space. Not while the link awaits it.
Result<Link::Target> NvlinkDomain::map(const Link& link, const RegionEntry& entry) {
  const uint64_t base = entry.base.load(std::memory_order_relaxed);
  const uint64_t length = entry.length.load(std::memory_order_relaxed);
  const auto memory = static_cast<uint32_t>(entry.memory.load(std::memory_order_relaxed));
  if (link.same_process()) {
    // Two engines of one process share addresses; their GPUs need access to each other.
    const auto device = static_cast<int>(entry.device.load(std::memory_order_relaxed));
    if (device != context_->device()) {
      if (Status reached = memory == 0 ? reach_gpu(device) : reach_pieces(base, length); !reached) {
        return reached.error();
      }
    }
    return Link::Target{base, length, nullptr};
  }
  const uint64_t offset = entry.offset.load(std::memory_order_relaxed);
  if (memory == 0) {
    Result<std::shared_ptr<PeerAllocation>> mapping = peer_memory_.open(context_, entry.allocation);
    if (!mapping) return mapping.error();
    return Link::Target{mapping.value()->base() + offset, length, mapping.value()};
  }
  const PieceReceiver::Memory* arrived = link.peer_memory(memory);
  if (arrived == nullptr) return kLane.error(ErrorCode::kUnknownRegion, "write", "the peer has not sent this memory");
  if (arrived->failed) return *arrived->failed;
  const uint64_t bytes = arrived->allocation->mapping().bytes();
  if (offset > bytes || length > bytes - offset) {
    return kLane.error(ErrorCode::kOutOfRange, "write", "the peer's region is larger than the memory behind it");
  }
  return Link::Target{arrived->allocation->base() + offset, length, arrived->allocation, memory};
}

Status NvlinkDomain::reach_gpu(int device) const {
  Result<std::shared_ptr<cuda::Context>> other = cuda::Context::retain(device);
  if (!other) return kLane.named(other.error());
  const cuda::Context::Scope scope(*context_);
  const int result = driver_->cuCtxEnablePeerAccess(other.value()->handle(), 0);
  if (result == cuda::kSuccess || result == cuda::kPeerAccessAlreadyEnabled) return {};
  Error error = kLane.named(cuda::cuda_error("accept", "cuCtxEnablePeerAccess", result));
  error.code = ErrorCode::kRefused;
  return error;
}

Status NvlinkDomain::reach_pieces(cuda::DevicePointer base, uint64_t bytes) const {
  const Result<std::vector<cuda::Piece>> pieces = cuda::pieces_of(*driver_, base, bytes);
  if (!pieces) return kLane.named(pieces.error());
  if (Status allowed = cuda::allow_access(*context_, pieces.value()); !allowed) {
    return cannot_be_mapped(allowed.error());
  }
  return {};
}

// Maps what the peer has registered so far, so that its first write finds it done, and a GPU that cannot be reached is
// found out while another lane can still be chosen. Of memory in pieces the first one tells that.
Status NvlinkDomain::map_all(Link& link) {
  for (const RegionEntry& entry : link.board().regions) {
    const uint64_t rkey = entry.rkey.load(std::memory_order_acquire);
    if (rkey == 0 || link.awaits(entry)) continue;
    Result<Link::Target> target = map(link, entry);
    if (!target) return target.error();
    link.targets().insert_or_assign(rkey, std::move(target.value()));
  }
  return {};
}

// Sends or maps one piece: that takes as long as a turn should.
bool NvlinkDomain::move_piece() {
  auto next = links_.upper_bound(last_moved_);
  for (size_t i = links_.size(); i > 0; --i, ++next) {
    if (next == links_.end()) next = links_.begin();
    Link& link = *next->second;
    last_moved_ = next->first;
    if (context_ != nullptr) {
      const Result<bool> mapped = link.map_piece(context_);
      if (!mapped) break_down(link, mapped.error());
      if (!mapped || mapped.value()) return true;
    }
    if (link.send_piece(*driver_)) return true;
  }
  return false;
}

// Unmaps `mapping` when no copy under way can use it: what is launched, or is gathered for the next launch.
void NvlinkDomain::retire(std::shared_ptr<PeerAllocation> mapping) {
  retired_.push_back({copier_ != nullptr ? copier_->launched() + 1 : 0, std::move(mapping)});
}

void NvlinkDomain::retire_unused(Link& link) {
  for (std::shared_ptr<PeerAllocation>& mapping : link.take_unused()) retire(std::move(mapping));
}

// Part by part: 3,000 pieces at a time would take 150 ms.
bool NvlinkDomain::unmap_retired() {
  if (retired_.empty()) return false;
  const Retired& first = retired_.front();
  if (!launches_.empty() && launches_.front().number <= first.launch) return false;
  if (!first.mapping->unmap_part()) retired_.pop_front();
  return true;
}

}  // namespace kvc::nvlink
