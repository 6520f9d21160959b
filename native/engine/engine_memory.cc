// TransferEngine: memory of this process and of its peers.
#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "cuda/gpu_memory.h"
#include "engine/engine_impl.h"
#include "engine/handshake.h"

namespace kvc {

namespace {

// Memories that the transfer thread publishes in one turn: 0.1 us for each, times a few domains at most.
constexpr size_t kPublishedPerTurn = 256;

// Regions that import_regions() adds under one lock, which every write takes. Each takes about 0.2 us.
constexpr size_t kImportedPerLock = 256;

// A range that is registered in one piece, and the caller's ranges in it.
struct MergedRange {
  MemoryRange whole;
  std::vector<size_t> ranges;  // indices in the caller's list
};

Status check_range(const MemoryRange& range) {
  if (range.base == nullptr || range.bytes == 0) {
    return invalid("register_memory", "the region is empty: give an address and at least 1 byte");
  }
  if (range.bytes > UINT64_MAX - reinterpret_cast<uintptr_t>(range.base)) {
    return invalid("register_memory", "the region ends beyond the address space");
  }
  return {};
}

// True if the memfd of `range` continues that of `piece`.
bool same_file(const MemoryRange& piece, const MemoryRange& range) {
  if (piece.memfd != range.memfd) return false;
  return piece.memfd < 0 || range.memfd_offset - piece.memfd_offset == static_cast<uint64_t>(range.base - piece.base);
}

std::vector<MergedRange> pieces_of(std::span<const MemoryRange> ranges) {
  std::vector<size_t> order(ranges.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ranges[a].base < ranges[b].base; });
  std::vector<MergedRange> pieces;
  // End of the GPU allocation that holds the last piece's end. Null: the piece is host memory.
  const std::byte* allocation_end = nullptr;
  for (const size_t i : order) {
    const MemoryRange& range = ranges[i];
    const auto continues = [&](const MemoryRange& last) {
      if (allocation_end != nullptr) return range.base < allocation_end;
      return range.base <= last.base + last.bytes && same_file(last, range);
    };
    if (pieces.empty() || !continues(pieces.back().whole)) pieces.push_back({range, {}});
    auto& [whole, members] = pieces.back();
    whole.bytes = std::max(whole.bytes, static_cast<uint64_t>(range.base - whole.base) + range.bytes);
    members.push_back(i);
    allocation_end = cuda::allocation_end(whole.base + whole.bytes - 1);
  }
  return pieces;
}

}  // namespace

Result<RegionId> TransferEngine::register_memory(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) {
  const MemoryRange range{base, bytes, memfd, memfd_offset};
  Result<std::vector<RegionId>> regions = register_memory(std::span(&range, 1));
  if (!regions) return regions.error();
  return regions.value().front();
}

Result<std::vector<RegionId>> TransferEngine::register_memory(std::span<const MemoryRange> ranges) {
  if (ranges.empty() || ranges.size() > kMaxRegions) {
    return invalid("register_memory",
                   std::to_string(ranges.size()) + " ranges: one call takes 1 to " + std::to_string(kMaxRegions));
  }
  for (const MemoryRange& range : ranges) {
    if (Status status = check_range(range); !status) return status.error();
  }
  return impl_->on_memory_thread("register_memory", [&]() -> Result<std::vector<RegionId>> {
    const std::vector<MergedRange> pieces = pieces_of(ranges);
    std::vector<std::shared_ptr<LocalMemory>> memories;
    for (const MergedRange& piece : pieces) {
      // On an error, the memories before it simply end, because no peer has received their keys.
      Result<std::shared_ptr<LocalMemory>> memory =
          impl_->lanes.register_memory(piece.whole, impl_->config.allow_fallback);
      if (!memory) return memory.error();
      memories.push_back(std::move(memory.value()));
    }
    const auto publish = [&, next = size_t{0}]() mutable {
      for (size_t i = 0; i < kPublishedPerTurn && next < memories.size(); ++i) impl_->group.publish(*memories[next++]);
      return next == memories.size() &&
             std::ranges::all_of(memories, [&](const auto& memory) { return impl_->group.published(*memory); });
    };
    if (Status published = impl_->transfer_thread.call_until("register_memory", publish, Timeout::max(), {});
        !published) {
      return published.error();
    }
    std::vector<RegionId> ids(ranges.size());
    for (size_t i = 0; i < pieces.size(); ++i) {
      for (const size_t place : pieces[i].ranges) {
        ids[place] = impl_->region_ids.next();
        memories[i]->regions.push_back(ids[place]);
        impl_->regions.insert(ids[place], std::make_shared<LocalRegion>(ids[place], ranges[place].base,
                                                                        ranges[place].bytes, memories[i]));
      }
    }
    return ids;
  });
}

Status TransferEngine::deregister_memory(RegionId region, Timeout timeout) {
  return deregister_memory(std::span(&region, 1), timeout);
}

Status TransferEngine::deregister_memory(std::span<const RegionId> ids, Timeout timeout) {
  constexpr const char* kOperation = "deregister_memory";
  std::vector<std::shared_ptr<LocalMemory>> memories;
  for (const RegionId id : ids) {
    const std::shared_ptr<LocalRegion> region = impl_->regions.find(id);
    if (region == nullptr) {
      return Impl::unknown_region(
          kOperation, "no local region " + std::to_string(id) + ": it was deregistered or never registered");
    }
    if (std::find(memories.begin(), memories.end(), region->memory) != memories.end()) continue;
    for (const RegionId other : region->memory->regions) {
      if (std::find(ids.begin(), ids.end(), other) != ids.end()) continue;
      return invalid(kOperation, "region " + std::to_string(id) + " shares its keys with region " +
                                     std::to_string(other) + ": deregister them together");
    }
    memories.push_back(region->memory);
  }
  Status status = impl_->transfer_thread.call_until(
      kOperation,
      [impl = impl_.get(), memories] {
        bool all = true;
        for (const auto& memory : memories) all &= impl->group.withdraw_step(*memory);
        if (!all) return false;
        for (const auto& memory : memories) {
          for (const RegionId id : memory->regions) impl->group.scheduler().endings().retire(impl->regions.erase(id));
        }
        return true;
      },
      timeout,
      "writes of a peer may still land, or a peer still maps the memory: fence the peer that does not respond");
  if (!status) return status;
  // The owner may free the memory only when the NIC does not know it any more.
  return impl_->on_memory_thread(kOperation, [&]() -> Status {
    for (const auto& memory : memories) memory->registrations.clear();
    return {};
  });
}

Result<Bytes> TransferEngine::region_descriptor(RegionId region) { return region_descriptor(std::span(&region, 1)); }

Result<Bytes> TransferEngine::region_descriptor(std::span<const RegionId> ids) {
  if (ids.empty()) return invalid("region_descriptor", "no region given");
  RegionDescriptor descriptor;
  for (const Lane& lane : impl_->lanes.all()) {
    descriptor.lanes.push_back({lane.provider, static_cast<uint32_t>(lane.domains.size())});
  }
  std::vector<const LocalMemory*> memories;
  for (const RegionId id : ids) {
    const std::shared_ptr<LocalRegion> region = impl_->regions.find(id);
    if (region == nullptr) {
      return Impl::unknown_region(
          "region_descriptor", "no local region " + std::to_string(id) + ": it was deregistered or never registered");
    }
    const LocalMemory& memory = *region->memory;
    // In most lists, regions of one piece follow each other.
    auto known = std::find(memories.rbegin(), memories.rend(), &memory);
    if (known == memories.rend()) {
      memories.push_back(&memory);
      known = memories.rbegin();
      RegionDescriptor::Memory& told = descriptor.memories.emplace_back();
      told.base = reinterpret_cast<uintptr_t>(memory.range.base);
      told.bytes = memory.range.bytes;
      for (const Lane& lane : impl_->lanes.all()) {
        std::vector<uint64_t>& rkeys = told.rkeys.emplace_back();
        for (const LaneDomain& domain : lane.domains) {
          if (const std::optional<uint64_t> key = memory.keys[domain.place]) rkeys.push_back(*key);
        }
      }
    }
    descriptor.regions.push_back({static_cast<uint32_t>(std::distance(known, memories.rend()) - 1),
                                  static_cast<uint64_t>(region->base - memory.range.base), region->bytes});
  }
  return encode(descriptor);
}

Result<RemoteRegionId> TransferEngine::import_region(PeerId peer, std::span<const std::byte> descriptor) {
  Result<std::vector<RemoteRegionId>> regions = import_regions(peer, descriptor);
  if (!regions) return regions.error();
  if (regions.value().size() == 1) return regions.value().front();
  return invalid("import_region",
                 "the descriptor holds " + std::to_string(regions.value().size()) + " regions: call import_regions()");
}

Result<std::vector<RemoteRegionId>> TransferEngine::import_regions(PeerId peer_id, std::span<const std::byte> bytes) {
  constexpr const char* kOperation = "import_regions";
  const Result<std::shared_ptr<Peer>> found = impl_->find_connected(peer_id, kOperation);
  if (!found) return found.error();
  Peer& peer = *found.value();
  const std::optional<RegionDescriptor> descriptor = decode_region_descriptor(bytes);
  if (!descriptor) {
    return invalid(kOperation, "the bytes are not a region descriptor of this version: run one release on both sides");
  }
  const auto lane = std::find_if(descriptor->lanes.begin(), descriptor->lanes.end(), [&](const auto& candidate) {
    return candidate.provider == peer.provider && candidate.domains == peer.remote_domains;
  });
  if (lane == descriptor->lanes.end()) {
    return invalid(kOperation, "the descriptor has no keys for the lane to this peer (" + peer.provider + ", " +
                                   std::to_string(peer.remote_domains) + " domains)");
  }
  const auto place = static_cast<size_t>(lane - descriptor->lanes.begin());
  std::vector<std::shared_ptr<const RemoteRegion>> regions;
  for (const RegionDescriptor::Region& region : descriptor->regions) {
    const RegionDescriptor::Memory& memory = descriptor->memories[region.memory];
    if (memory.rkeys[place].empty()) {
      return Error{
          ErrorCode::kNotReachable, peer.provider, peer.name, kOperation,
          "the lane to this peer does not reach this memory of the peer: either the lane takes GPU memory and this is "
          "host memory, or the other way round"};
    }
    regions.push_back(std::make_shared<const RemoteRegion>(impl_->remote_region_ids.next(), peer_id, memory.base,
                                                           region.offset, region.bytes, memory.rkeys[place]));
  }
  std::vector<RemoteRegionId> ids;
  ids.reserve(regions.size());
  bool connected = true;
  while (connected && ids.size() < regions.size()) {
    const std::unique_lock lock(impl_->writes_mutex);
    const size_t end = std::min(regions.size(), ids.size() + kImportedPerLock);
    while (ids.size() < end) {
      auto& region = regions[ids.size()];
      const RemoteRegionId id = ids.emplace_back(region->id);
      peer.regions.push_back(id);
      impl_->remote_regions.insert_locked(id, std::move(region));
    }
    // Read after the insertion: a fence first changes the state, and then forgets the regions that it finds.
    connected = peer.state.load(std::memory_order_seq_cst) == Peer::State::kConnected;
  }
  if (connected) return ids;
  // The ids were not returned yet. Regions that a fence has not reached are removed here, and the fence finds them
  // gone.
  for (const RemoteRegionId id : ids) impl_->remote_regions.erase(id);
  return Error{ErrorCode::kPeerDown, peer.provider, peer.name, kOperation,
               "the peer was lost, fenced or disconnected during the call"};
}

}  // namespace kvc
