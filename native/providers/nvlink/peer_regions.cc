#include "providers/nvlink/peer_regions.h"

#include <algorithm>

namespace kvc::nvlink {

using same_host::Message;

namespace {

// Regions in the control thread's queue that are mapped in advance: enough that it is never idle between two turns.
constexpr size_t kPrefetched = 16;

}  // namespace

// --- PeerRegion

PeerRegion::PeerRegion(uint64_t key, const RegionEntry& entry, bool same_process)
    : rkey(key),
      bytes(entry.length.load(std::memory_order_relaxed)),
      pieces_bytes(same_process ? 0 : entry.pieces_bytes.load(std::memory_order_relaxed)),
      same_process_(same_process),
      their_base_(entry.base.load(std::memory_order_relaxed)),
      offset_(entry.offset.load(std::memory_order_relaxed)),
      device_(static_cast<int>(entry.device.load(std::memory_order_relaxed))),
      allocation_(entry.allocation) {}

void PeerRegion::map(PeerMemory& memory) {
  if (same_process_) {
    // Two engines of one process share addresses. Their GPUs need access to each other.
    const bool other = device_ != memory.context()->device();
    const bool in_pieces = other && allocation_ == cuda::IpcHandle{};
    Status reached = in_pieces ? memory.reach_pieces(their_base_, bytes) : memory.reach_gpu(device_);
    return reached ? ready(their_base_) : fail(std::move(reached.error()));
  }
  Result<std::shared_ptr<IpcMapping>> mapping = memory.open(allocation_);
  if (!mapping) return fail(std::move(mapping.error()));
  mapping_ = std::move(mapping.value());
  ready_within(mapping_->base, mapping_->bytes);
}

void PeerRegion::append(PeerMemory& memory, int descriptor, uint64_t piece_bytes) {
  if (error_) return;
  if (!pieces_) {
    Result<cuda::PieceMapping> reserved = cuda::PieceMapping::reserve(memory.context(), pieces_bytes);
    if (!reserved) return fail(kLane.named(reserved.error()));
    pieces_ = std::move(reserved.value());
  }
  if (Status mapped = pieces_->append(descriptor, piece_bytes); !mapped) return fail(cannot_be_mapped(mapped.error()));
  reached_.store(true, std::memory_order_release);
  if (!pieces_->complete()) return;
  ready_within(pieces_->base(), pieces_bytes);
}

void PeerRegion::ready_within(cuda::DevicePointer memory, uint64_t memory_bytes) {
  if (fits(offset_, bytes, memory_bytes)) return ready(memory + offset_);
  fail(kLane.error(ErrorCode::kOutOfRange, "write", "the peer's region is larger than the memory behind it"));
}

void PeerRegion::ready(cuda::DevicePointer base) noexcept {
  base_ = base;
  reached_.store(true, std::memory_order_release);
  state_.store(State::kReady, std::memory_order_release);
}

void PeerRegion::fail(Error error) {
  if (error_) return;
  error_ = std::move(error);
  state_.store(State::kFailed, std::memory_order_release);
}

// --- PeerRegions

PeerRegion* PeerRegions::find(uint64_t rkey, const RegionEntry& entry, ControlQueue& control) {
  const uint32_t place = place_of(rkey);
  if (const auto found = regions_.find(place); found != regions_.end()) {
    if (found->second->rkey == rkey) return found->second.get();
    if (!same_process_) return nullptr;
    // Within one process no kForget is sent and nothing is mapped: the region on the board replaces the old one at
    // once.
    std::erase(coming_, found->second);
    regions_.erase(found);
  }
  const auto region = std::make_shared<PeerRegion>(rkey, entry, same_process_);
  if (region->pieces_bytes != 0) return nullptr;
  regions_.emplace(place, region);
  coming_.push_back(region);
  control.run([region, memory = memory_] { region->map(*memory); });
  return region.get();
}

bool PeerRegions::may_prefetch(const Board& board) const noexcept {
  const uint64_t places = std::min<uint64_t>(board.places.load(std::memory_order_acquire), kMaxRegions);
  return prefetched_ < places && coming_.size() < kPrefetched;
}

bool PeerRegions::prefetch(const Board& board, ControlQueue& control) {
  bool any = false;
  // The number of looks is bounded even if nothing is mapped, because the entries have to be fetched from memory.
  for (size_t i = 0; i < kPrefetched && may_prefetch(board); ++i, any = true) {
    const RegionEntry& entry = board.regions[prefetched_++];
    if (const uint64_t rkey = entry.rkey.load(std::memory_order_acquire); rkey != 0) find(rkey, entry, control);
  }
  return any;
}

bool PeerRegions::hear(const Message& message, UniqueFd descriptor, const Board& board, ControlQueue& control) {
  if (message.memory != place_of(message.key) || message.memory >= board.places.load(std::memory_order_acquire)) {
    return false;
  }
  if (heard_ - progress_->pieces.load(std::memory_order_acquire) >= kUntakenPieces) return false;
  if ((message.bytes == 0) == static_cast<bool>(descriptor)) return false;
  ++heard_;
  auto found = regions_.find(message.memory);
  if (found == regions_.end()) {
    // A region is written to the board before its pieces are announced. If it is not there, it was revoked, and a
    // kForget follows.
    const RegionEntry* const entry = board.find(message.key);
    if (entry == nullptr) {
      progress_->pieces.fetch_add(1, std::memory_order_release);
      return true;
    }
    found = regions_.emplace(message.memory, std::make_shared<PeerRegion>(message.key, *entry, same_process_)).first;
    coming_.push_back(found->second);
  }
  PeerRegion& region = *found->second;
  if (message.key != region.rkey) return false;
  if (message.bytes > region.pieces_bytes - region.heard) return false;
  region.heard += message.bytes;
  control.run([region = found->second, memory = memory_, progress = progress_, bytes = message.bytes,
               piece = std::make_shared<UniqueFd>(std::move(descriptor))] {
    if (bytes > 0) {
      region->append(*memory, piece->get(), bytes);
    } else {
      region->fail(
          kLane.error(ErrorCode::kRefused, "accept",
                      "the peer could not export its GPU memory: it may be out of file descriptors (ulimit -n)"));
    }
    piece->reset();
    progress->pieces.fetch_add(1, std::memory_order_release);
  });
  return true;
}

bool PeerRegions::forget(const Message& message, uint64_t launch) {
  if (message.memory >= kMaxRegions) return false;
  Forgotten forgotten{launch, nullptr};
  if (auto region = regions_.extract(message.memory)) forgotten.region = std::move(region.mapped());
  std::erase(coming_, forgotten.region);
  forgotten_.push_back(std::move(forgotten));
  return true;
}

// Runs in the order of the peer's kForgets, because the control thread keeps the order.
void PeerRegions::let_go(std::shared_ptr<PeerRegion> region, ControlQueue& control) {
  control.run([region = std::move(region), progress = progress_]() mutable {
    region.reset();
    progress->let_go.fetch_add(1, std::memory_order_release);
  });
}

bool PeerRegions::write_down(AccountWords& out) {
  const uint64_t pieces = progress_->pieces.load(std::memory_order_acquire);
  const uint64_t let_go = progress_->let_go.load(std::memory_order_acquire);
  if (pieces == pieces_told_ && let_go == let_go_told_) return false;
  out.pieces_taken.store(pieces_told_ = pieces, std::memory_order_seq_cst);
  out.let_go.store(let_go_told_ = let_go, std::memory_order_seq_cst);
  return true;
}

const Error* PeerRegions::useless() {
  const Error* why = nullptr;
  std::erase_if(coming_, [&](const auto& region) {
    reached_any_ |= region->reached();
    if (region->state() == PeerRegion::State::kFailed && why == nullptr) why = &region->error();
    return region->state() != PeerRegion::State::kComing;
  });
  return reached_any_ ? nullptr : why;
}

std::vector<std::shared_ptr<PeerRegion>> PeerRegions::take_all() {
  std::vector<std::shared_ptr<PeerRegion>> all;
  all.reserve(regions_.size() + forgotten_.size());
  for (auto& [place, region] : regions_) all.push_back(std::move(region));
  for (Forgotten& forgotten : forgotten_) all.push_back(std::move(forgotten.region));
  regions_.clear();
  coming_.clear();
  forgotten_.clear();
  return all;
}

}  // namespace kvc::nvlink
