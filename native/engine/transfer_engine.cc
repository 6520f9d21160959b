#include "engine/transfer_engine.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <shared_mutex>
#include <string>
#include <utility>

#include "cuda/stream_signal.h"
#include "engine/counter_sets.h"
#include "engine/domain_group.h"
#include "engine/event_queue.h"
#include "engine/group_transfer.h"
#include "engine/handshake.h"
#include "engine/memory_region.h"
#include "engine/message.h"
#include "engine/message_pool.h"
#include "engine/peer.h"
#include "engine/registry.h"
#include "engine/request.h"
#include "engine/stats.h"
#include "engine/transfer.h"
#include "engine/waker.h"
#include "engine/worker.h"

namespace kvc {

namespace {

// Messages to one peer that it has not taken. Beyond this its user does not read, and the sender's memory (4 MiB) should
// not pay for it.
constexpr uint32_t kMaxPendingSends = 1024;

Error invalid(std::string operation, std::string message) {
  return Error{ErrorCode::kInvalidArgument, {}, {}, std::move(operation), std::move(message)};
}

Status check_config(const EngineConfig& config) {
  if (config.name.empty() || config.name.size() > kMaxNameBytes) {
    return invalid("create", "the engine needs a name of 1 to " + std::to_string(kMaxNameBytes) + " bytes");
  }
  if (config.domains.empty() || config.domains.size() > kMaxDomains) {
    return invalid("create", std::to_string(config.domains.size()) + " domains configured; 1 to " +
                                 std::to_string(kMaxDomains) + " are possible");
  }
  std::set<std::string> providers;
  for (const DomainConfig& domain : config.domains) providers.insert(domain.provider);
  if (providers.size() > kMaxLanes) return invalid("create", "too many different providers");
  return {};
}

// The pages of one side against their region, the layers' offsets included. Overflow-safe: a page index is compared
// with the largest that fits, never multiplied.
Status check_pages(const char* side, const Pages& pages, uint64_t extra_offset, uint64_t page_bytes,
                   uint64_t region_bytes) {
  const auto out_of_range = [&](const std::string& what) {
    return Error{ErrorCode::kOutOfRange,
                 {},
                 {},
                 "write_pages",
                 std::string(side) + " " + what + " lies outside the region of " + std::to_string(region_bytes) +
                     " bytes (offset " + std::to_string(pages.offset) + " + " + std::to_string(extra_offset) +
                     ", stride " + std::to_string(pages.stride) + ", page " + std::to_string(page_bytes) + " bytes)"};
  };
  if (pages.indices.empty()) return {};
  uint64_t first = 0;
  uint64_t end = 0;
  if (__builtin_add_overflow(pages.offset, extra_offset, &first) || __builtin_add_overflow(first, page_bytes, &end) ||
      end > region_bytes) {
    return out_of_range("page 0");
  }
  const uint64_t largest = pages.stride == 0 ? INT64_MAX : (region_bytes - end) / pages.stride;
  for (const int64_t index : pages.indices) {
    // A negative index is above every `largest` once it is unsigned.
    if (static_cast<uint64_t>(index) > largest) return out_of_range("page index " + std::to_string(index));
  }
  return {};
}

}  // namespace

class TransferEngine::Impl {
 public:
  Impl(EngineConfig engine_config, std::shared_ptr<Waker> shared_waker)
      : config(std::move(engine_config)),
        waker(std::move(shared_waker)),
        group(config, peers, transfers, remote_regions, counters, events, messages, stats),
        worker(config, group, waker, stats) {}

  Result<std::shared_ptr<Transfer>> find_transfer(TransferId id, const char* operation) const {
    std::shared_ptr<Transfer> transfer = transfers.find(id);
    if (transfer == nullptr) return no_transfer(id, operation);
    return transfer;
  }

  Result<std::shared_ptr<Peer>> find_peer(PeerId id, const char* operation) const {
    std::shared_ptr<Peer> peer = peers.find(id);
    if (peer == nullptr) {
      return Error{
          ErrorCode::kUnknownPeer, {}, {}, operation, "no peer " + std::to_string(id) + ": never connected, or fenced"};
    }
    return peer;
  }

  // What a write needs, belonging together.
  struct Ends {
    Transfer* transfer = nullptr;
    LocalRegion* source = nullptr;
    const RemoteRegion* target = nullptr;
  };
  // Finds the regions of `ends.transfer`. The caller holds writes_mutex as long as it uses them.
  Status peek_regions(Ends& ends, RegionId source_id, RemoteRegionId target_id, const char* operation) const {
    ends.source = regions.peek(source_id);
    ends.target = remote_regions.peek(target_id);
    if (ends.source == nullptr) return unknown_region(operation, "no local region " + std::to_string(source_id));
    if (ends.target == nullptr) return unknown_region(operation, "no imported region " + std::to_string(target_id));
    if (ends.target->peer != ends.transfer->peer->id) {
      return invalid(operation, "region " + std::to_string(target_id) + " belongs to another peer than the transfer");
    }
    return {};
  }
  Status peek_ends(Ends& ends, TransferId transfer_id, RegionId source_id, RemoteRegionId target_id,
                   const char* operation) const {
    ends.transfer = transfers.peek(transfer_id);
    if (ends.transfer == nullptr) return no_transfer(transfer_id, operation);
    return peek_regions(ends, source_id, target_id, operation);
  }
  // The same for longer than a moment.
  struct HeldEnds {
    std::shared_ptr<Transfer> transfer;
    std::shared_ptr<LocalRegion> source;
    std::shared_ptr<const RemoteRegion> target;
  };
  Status hold_ends(HeldEnds& held, TransferId transfer_id, RegionId source_id, RemoteRegionId target_id,
                   const char* operation) {
    const std::shared_lock lock(writes_mutex);
    Ends ends;
    if (Status status = peek_ends(ends, transfer_id, source_id, target_id, operation); !status) return status;
    held = {ends.transfer->shared_from_this(), ends.source->shared_from_this(), ends.target->shared_from_this()};
    return {};
  }
  static Error no_transfer(TransferId id, const char* operation) {
    return invalid(operation, "no open transfer " + std::to_string(id) + ": it has ended");
  }
  static Error unknown_region(const char* operation, std::string message) {
    return Error{ErrorCode::kUnknownRegion, {}, {}, operation, std::move(message)};
  }

  // A transfer that only its maker knows: publish() makes it one of the engine's.
  Result<std::shared_ptr<Transfer>> make_transfer(PeerId peer_id, EventCallback callback,
                                                  Transfer::Kind kind = Transfer::Kind::kWrites) {
    Result<std::shared_ptr<Peer>> peer = find_peer(peer_id, "open_transfer");
    if (!peer) return peer.error();
    if (peer.value()->state.load(std::memory_order_acquire) == Peer::State::kOffered) {
      return invalid("open_transfer", "peer " + peer.value()->name + " has not answered yet: call complete() first");
    }
    return std::make_shared<Transfer>(next_id.fetch_add(1, std::memory_order_relaxed), std::move(peer.value()),
                                      std::move(callback), kind);
  }
  Status publish(const std::shared_ptr<Transfer>& transfer) {
    const std::unique_lock lock(writes_mutex);
    return publish_locked(transfer);
  }
  Status publish_locked(const std::shared_ptr<Transfer>& transfer) {
    transfers.insert_locked(transfer->id, transfer);
    // After the insertion: when the peer goes down, the worker first changes its state and then fails every transfer
    // that it finds. Either it will find this one, or we see the new state here.
    const Peer& peer = *transfer->peer;
    const Peer::State state = peer.state.load(std::memory_order_seq_cst);
    if (state == Peer::State::kConnected) return {};
    transfers.erase_locked(transfer->id);
    return Error{ErrorCode::kPeerDown, peer.provider, peer.name, "open_transfer",
                 state == Peer::State::kLeaving ? "this peer is leaving: nothing new can be sent to it"
                                                : "the link to this peer broke: fence it, then connect again"};
  }

  Status check_single(const Ends& ends, const SingleWrite& write, uint64_t bytes) const {
    if (bytes == 0) return invalid("write", "a write of 0 bytes");
    const Peer& peer = *ends.transfer->peer;
    if (write.domain && *write.domain >= group.lane_domains(peer.provider)) {
      return invalid("write", "domain " + std::to_string(*write.domain) + " of " +
                                  std::to_string(group.lane_domains(peer.provider)) + " in this peer's lane (" +
                                  peer.provider + ")");
    }
    const auto fits = [&](uint64_t offset, uint64_t region) { return bytes <= region && offset <= region - bytes; };
    if (!fits(write.source_offset, ends.source->bytes) || !fits(write.target_offset, ends.target->bytes)) {
      return Error{ErrorCode::kOutOfRange,
                   {},
                   peer.name,
                   "write",
                   std::to_string(bytes) + " bytes from offset " + std::to_string(write.source_offset) + " of " +
                       std::to_string(ends.source->bytes) + " to offset " + std::to_string(write.target_offset) +
                       " of " + std::to_string(ends.target->bytes)};
    }
    return {};
  }

  // What a member of a group is to be sent, or why it cannot be.
  using Part = Result<Request>;
  // Opens and seals one transfer for each member; parts[i] is member i's. None at all (nullopt) is a part that is done.
  Result<TransferId> post_to_group(const std::shared_ptr<PeerGroup>& members, std::vector<std::optional<Part>> parts,
                                   EventCallback callback);
  Result<std::shared_ptr<PeerGroup>> find_group(PeerGroupId id, size_t parts, const char* operation) const {
    std::shared_ptr<PeerGroup> group = peer_groups.find(id);
    if (group == nullptr) return invalid(operation, "no peer group " + std::to_string(id));
    if (group->members.size() != parts) {
      return invalid(operation, std::to_string(parts) + " given for a group of " +
                                    std::to_string(group->members.size()) + " members: one for each, in their order");
    }
    return group;
  }

  const EngineConfig config;
  std::shared_mutex peers_mutex;
  std::shared_mutex writes_mutex;  // of what a write looks up
  Registry<Peer> peers{peers_mutex};
  Registry<PeerGroup> peer_groups{peers_mutex};
  Registry<GroupTransfer> group_transfers{peers_mutex};
  Registry<Transfer> transfers{writes_mutex};
  Registry<LocalRegion> regions{writes_mutex};
  Registry<const RemoteRegion> remote_regions{writes_mutex};
  CounterSets counters;
  EventQueue events;
  MessagePool messages;
  Stats stats;
  std::atomic<uint64_t> next_id{1};  // of everything that has an id here, but counter sets
  std::shared_ptr<Waker> waker;
  DomainGroup group;
  Worker worker;  // last: its destructor stops the thread that uses all of the above
};

TransferEngine::TransferEngine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TransferEngine::~TransferEngine() = default;

Result<std::unique_ptr<TransferEngine>> TransferEngine::create(EngineConfig config) {
  if (Status status = check_config(config); !status) return status.error();
  Result<std::shared_ptr<Waker>> waker = Waker::create();
  if (!waker) return waker.error();
  auto impl = std::make_unique<Impl>(std::move(config), std::move(waker.value()));
  if (Status status = impl->events.open(); !status) return status.error();
  if (Status status = impl->messages.open(); !status) return status.error();
  if (Status status = impl->worker.start(); !status) return status.error();
  return std::unique_ptr<TransferEngine>(new TransferEngine(std::move(impl)));
}

// --- Memory

Result<RegionId> TransferEngine::register_memory(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) {
  if (base == nullptr || bytes == 0) return invalid("register_memory", "an empty region");
  if (bytes > UINT64_MAX - reinterpret_cast<uintptr_t>(base)) {
    return invalid("register_memory", "the region ends beyond the address space");
  }
  auto region = std::make_shared<LocalRegion>();
  region->id = static_cast<RegionId>(impl_->next_id.fetch_add(1, std::memory_order_relaxed));
  region->base = base;
  region->bytes = bytes;
  const Status status =
      impl_->worker.call("register_memory", [&] { return impl_->group.register_region(*region, memfd, memfd_offset); });
  if (!status) return status.error();
  const RegionId id = region->id;
  impl_->regions.insert(id, std::move(region));
  return id;
}

Status TransferEngine::deregister_memory(RegionId id, Timeout timeout) {
  std::shared_ptr<LocalRegion> region = impl_->regions.find(id);
  if (region == nullptr) return Impl::unknown_region("deregister_memory", "no local region " + std::to_string(id));
  const Status status = impl_->worker.call_until(
      "deregister_memory",
      [impl = impl_.get(), region] {
        if (!impl->group.deregister_step(*region)) return false;
        if (impl->regions.erase(region->id) != nullptr) impl->group.scheduler().retire(region);
        return true;
      },
      timeout, "writes may still be landing in region " + std::to_string(id) + ": fence the peer that is stuck");
  return status;
}

Result<Bytes> TransferEngine::region_descriptor(RegionId id) {
  const std::shared_ptr<LocalRegion> region = impl_->regions.find(id);
  if (region == nullptr) return Impl::unknown_region("region_descriptor", "no local region " + std::to_string(id));
  // rkeys and the group's lanes do not change after registration and start: no need to ask the worker.
  RegionDescriptor descriptor{reinterpret_cast<uintptr_t>(region->base), region->bytes, {}};
  for (auto& [provider, rkeys] : impl_->group.lane_rkeys(*region)) {
    descriptor.lanes.push_back({provider, std::move(rkeys)});
  }
  return encode(descriptor);
}

Result<RemoteRegionId> TransferEngine::import_region(PeerId peer_id, std::span<const std::byte> bytes) {
  const Result<std::shared_ptr<Peer>> peer = impl_->find_peer(peer_id, "import_region");
  if (!peer) return peer.error();
  if (peer.value()->state.load(std::memory_order_acquire) == Peer::State::kOffered) {
    return invalid("import_region", "peer " + peer.value()->name + " has not answered yet: call complete() first");
  }
  std::optional<RegionDescriptor> descriptor = decode_region_descriptor(bytes);
  if (!descriptor) return invalid("import_region", "not a region descriptor of an engine of this version");
  for (RegionDescriptor::Lane& lane : descriptor->lanes) {
    if (lane.provider != peer.value()->provider || lane.rkeys.size() != peer.value()->remote_domains) continue;
    const auto id = static_cast<RemoteRegionId>(impl_->next_id.fetch_add(1, std::memory_order_relaxed));
    impl_->remote_regions.insert(id, std::make_shared<const RemoteRegion>(id, peer_id, descriptor->base,
                                                                          descriptor->bytes, std::move(lane.rkeys)));
    return id;
  }
  return invalid("import_region", "the descriptor has no keys for the lane to this peer (" + peer.value()->provider +
                                      ", " + std::to_string(peer.value()->remote_domains) + " domains)");
}

// --- Peers

Result<Handshake> TransferEngine::offer(std::string name) {
  const auto id = static_cast<PeerId>(impl_->next_id.fetch_add(1, std::memory_order_relaxed));
  return impl_->worker.call("offer", [&] { return impl_->group.offer(id, std::move(name)); });
}

Result<Handshake> TransferEngine::accept(std::string name, std::span<const std::byte> offer) {
  const auto id = static_cast<PeerId>(impl_->next_id.fetch_add(1, std::memory_order_relaxed));
  return impl_->worker.call("accept", [&] { return impl_->group.accept(id, std::move(name), offer); });
}

Status TransferEngine::complete(PeerId peer_id, std::span<const std::byte> answer) {
  const Result<std::shared_ptr<Peer>> peer = impl_->find_peer(peer_id, "complete");
  if (!peer) return peer.error();
  return impl_->worker.call("complete", [&] { return impl_->group.complete(peer.value(), answer); });
}

Status TransferEngine::fence(PeerId peer_id, Timeout timeout) {
  const Result<std::shared_ptr<Peer>> found = impl_->find_peer(peer_id, "fence");
  if (!found) return found.error();
  const std::shared_ptr<Peer>& peer = found.value();
  const Error why{ErrorCode::kPeerDown, {}, {}, "fence", "this peer was fenced here"};
  Status status = impl_->worker.call_until(
      "fence", [impl = impl_.get(), peer, why] { return impl->group.fence_step(*peer, why); }, timeout,
      "a write of this peer may still land here: call again");
  if (!status) {
    status.error().peer = peer->name;
  }
  return status;
}

Status TransferEngine::disconnect(PeerId peer_id, Timeout timeout) {
  const Result<std::shared_ptr<Peer>> found = impl_->find_peer(peer_id, "disconnect");
  if (!found) return found.error();
  const std::shared_ptr<Peer>& peer = found.value();
  if (peer->state.load(std::memory_order_acquire) == Peer::State::kOffered) {
    return invalid("disconnect", "peer " + peer->name + " has not answered yet: fence() withdraws the offer");
  }
  // The step writes `broke` before the completion that this thread waits for.
  auto broke = std::make_shared<std::optional<Error>>();
  Status status = impl_->worker.call_until(
      "disconnect",
      [impl = impl_.get(), peer, broke] {
        if (impl->peers.find(peer->id) == nullptr) return true;
        if (peer->parting.fencing) return false;
        *broke = peer->down;
        if (broke->has_value()) return true;
        impl->group.leave(peer);
        return false;
      },
      timeout,
      "transfers or messages between us and this peer have not ended: seal or cancel what is open on both sides and "
      "call "
      "again, or fence()");
  if (!status) {
    status.error().peer = peer->name;
  } else if (broke->has_value()) {
    status = **broke;
  }
  return status;
}

Result<std::string> TransferEngine::lane(PeerId peer_id) {
  const Result<std::shared_ptr<Peer>> peer = impl_->find_peer(peer_id, "lane");
  if (!peer) return peer.error();
  if (peer.value()->state.load(std::memory_order_acquire) == Peer::State::kOffered) {
    return invalid("lane", "peer " + peer.value()->name + " has not answered yet: call complete() first");
  }
  return peer.value()->provider;
}

// --- Writing

Result<TransferId> TransferEngine::open_transfer(PeerId peer, EventCallback callback) {
  const Result<std::shared_ptr<Transfer>> transfer = impl_->make_transfer(peer, std::move(callback));
  if (!transfer) return transfer.error();
  if (Status status = impl_->publish(transfer.value()); !status) return status.error();
  return transfer.value()->id;
}

Status TransferEngine::write(TransferId transfer, RegionId source, uint64_t source_offset, RemoteRegionId target,
                             uint64_t target_offset, uint64_t bytes, std::optional<uint32_t> immediate,
                             std::optional<uint32_t> domain) {
  const SingleWrite write{source_offset, target_offset, domain};
  std::unique_ptr<Command> command = impl_->worker.take_command();
  {
    // Until the command is in the queue: what it refers to lives until the worker has taken it from there.
    const std::shared_lock lock(impl_->writes_mutex);
    Impl::Ends ends;
    if (Status status = impl_->peek_ends(ends, transfer, source, target, "write"); !status) return status;
    if (Status status = impl_->check_single(ends, write, bytes); !status) return status;
    command->body.emplace<AddWrite>(AddWrite{ends.transfer, ends.source, ends.target, bytes, immediate, write});
    impl_->worker.push(std::move(command));
  }
  impl_->worker.wake();
  return {};
}

Status TransferEngine::write_pages(TransferId transfer, PagedWrite write) {
  Impl::HeldEnds ends;
  if (Status status = impl_->hold_ends(ends, transfer, write.source, write.target, "write_pages"); !status) {
    return status;
  }
  if (write.page_bytes == 0) return invalid("write_pages", "pages of 0 bytes");
  if (write.source_pages.indices.size() != write.target_pages.indices.size()) {
    return invalid("write_pages", std::to_string(write.source_pages.indices.size()) + " source pages for " +
                                      std::to_string(write.target_pages.indices.size()) + " target pages");
  }
  if (Status s = check_pages("source", write.source_pages, 0, write.page_bytes, ends.source->bytes); !s) return s;
  if (Status s = check_pages("target", write.target_pages, 0, write.page_bytes, ends.target->bytes); !s) return s;
  if (write.source_pages.indices.empty()) return {};
  auto table =
      std::make_shared<const PageTable>(PageTable{std::move(write.source_pages), std::move(write.target_pages)});
  auto request = std::make_shared<Request>(std::move(ends.source), std::move(ends.target), write.page_bytes,
                                           write.immediate, TableWrite{std::move(table), 0, 0});
  impl_->worker.submit<AddRequest>(std::move(ends.transfer), std::move(request), false);
  return {};
}

Status TransferEngine::arm(TransferId transfer, std::shared_ptr<LayerSignal> signal, PagedWrite pages,
                           std::vector<ArmedLayer> layers) {
  Impl::HeldEnds ends;
  if (Status status = impl_->hold_ends(ends, transfer, pages.source, pages.target, "arm"); !status) return status;
  if (signal == nullptr) return invalid("arm", "no signal");
  if (pages.page_bytes == 0) return invalid("arm", "pages of 0 bytes");
  if (pages.source_pages.indices.size() != pages.target_pages.indices.size()) {
    return invalid("arm", std::to_string(pages.source_pages.indices.size()) + " source pages for " +
                              std::to_string(pages.target_pages.indices.size()) + " target pages");
  }
  for (const ArmedLayer& layer : layers) {
    if (Status s = check_pages("source", pages.source_pages, layer.source_offset, pages.page_bytes, ends.source->bytes);
        !s) {
      return s;
    }
    if (Status s = check_pages("target", pages.target_pages, layer.target_offset, pages.page_bytes, ends.target->bytes);
        !s) {
      return s;
    }
  }
  if (pages.source_pages.indices.empty() || layers.empty()) return {};
  auto table =
      std::make_shared<const PageTable>(PageTable{std::move(pages.source_pages), std::move(pages.target_pages)});
  impl_->worker.submit<Arm>(std::make_unique<ArmedPlan>(ArmedPlan{.transfer = std::move(ends.transfer),
                                                                  .signal = std::move(signal),
                                                                  .source = std::move(ends.source),
                                                                  .target = std::move(ends.target),
                                                                  .table = std::move(table),
                                                                  .page_bytes = pages.page_bytes,
                                                                  .layers = std::move(layers)}));
  return {};
}

Status TransferEngine::seal(TransferId transfer) {
  Result<std::shared_ptr<Transfer>> found = impl_->find_transfer(transfer, "seal");
  if (!found) return found.error();
  impl_->worker.submit<Seal>(std::move(found.value()));
  return {};
}

Status TransferEngine::cancel(TransferId transfer) {
  if (const std::shared_ptr<GroupTransfer> group = impl_->group_transfers.find(transfer)) {
    return impl_->worker.call("cancel", [&]() -> Status {
      for (const TransferId id : group->parts) {
        if (const std::shared_ptr<Transfer> part = impl_->transfers.find(id)) impl_->group.scheduler().cancel(*part);
      }
      return {};
    });
  }
  Result<std::shared_ptr<Transfer>> found = impl_->find_transfer(transfer, "cancel");
  if (!found) return found.error();
  return impl_->worker.call("cancel", [&]() -> Status {
    if (found.value()->ended) return invalid("cancel", "transfer " + std::to_string(transfer) + " has ended");
    impl_->group.scheduler().cancel(*found.value());
    return {};
  });
}

Status TransferEngine::quiesce(TransferId id, Timeout timeout) {
  const Result<std::shared_ptr<Transfer>> found = impl_->find_transfer(id, "quiesce");
  if (!found) return found.error();
  const std::shared_ptr<Transfer>& transfer = found.value();
  // The step writes `ended_with` before the completion that this thread waits for.
  auto ended_with = std::make_shared<std::optional<Error>>();
  Status status = impl_->worker.call_until(
      "quiesce",
      [transfer, ended_with] {
        if (!transfer->idle()) return false;
        *ended_with = transfer->error;
        return true;
      },
      timeout, "writes of transfer " + std::to_string(id) + " are still in flight");
  if (!status) return status;
  if (ended_with->has_value()) return **ended_with;
  return {};
}

Result<TransferProgress> TransferEngine::progress(TransferId transfer) {
  const Result<std::shared_ptr<Transfer>> found = impl_->find_transfer(transfer, "progress");
  if (!found) return found.error();
  const Transfer::Progress& progress = found.value()->progress;
  return TransferProgress{
      progress.pages_posted.load(std::memory_order_relaxed), progress.bytes_posted.load(std::memory_order_relaxed),
      progress.pages_done.load(std::memory_order_relaxed), progress.bytes_done.load(std::memory_order_relaxed)};
}

Result<TransferId> TransferEngine::write_one(PeerId peer, RegionId source, uint64_t source_offset,
                                             RemoteRegionId target, uint64_t target_offset, uint64_t bytes,
                                             std::optional<uint32_t> immediate, EventCallback callback,
                                             std::optional<uint32_t> domain) {
  const Result<std::shared_ptr<Transfer>> transfer = impl_->make_transfer(peer, std::move(callback));
  if (!transfer) return transfer.error();
  const TransferId id = transfer.value()->id;
  const SingleWrite write{source_offset, target_offset, domain};
  std::unique_ptr<Command> command = impl_->worker.take_command();
  {
    // As in write(); not shared, since the transfer becomes one of the engine's.
    const std::unique_lock lock(impl_->writes_mutex);
    Impl::Ends ends{.transfer = transfer.value().get()};
    if (Status status = impl_->peek_regions(ends, source, target, "write_one"); !status) return status.error();
    if (Status status = impl_->check_single(ends, write, bytes); !status) return status.error();
    if (Status status = impl_->publish_locked(transfer.value()); !status) return status.error();
    command->body.emplace<WriteOne>(WriteOne{{ends.transfer, ends.source, ends.target, bytes, immediate, write}});
    impl_->worker.push(std::move(command));
  }
  impl_->worker.wake();
  return id;
}

// --- Peer groups

Result<PeerGroupId> TransferEngine::add_peer_group(const std::vector<PeerId>& members) {
  auto group = std::make_shared<PeerGroup>();
  for (const PeerId id : members) {
    Result<std::shared_ptr<Peer>> peer = impl_->find_peer(id, "add_peer_group");
    if (!peer) return peer.error();
    if (peer.value()->state.load(std::memory_order_acquire) == Peer::State::kOffered) {
      return invalid("add_peer_group", "peer " + peer.value()->name + " has not answered yet: call complete() first");
    }
    group->members.push_back(std::move(peer.value()));
  }
  if (group->members.empty()) return invalid("add_peer_group", "a group without members");
  if (std::set<PeerId>(members.begin(), members.end()).size() != members.size()) {
    return invalid("add_peer_group", "a peer is named twice");
  }
  const auto id = static_cast<PeerGroupId>(impl_->next_id.fetch_add(1, std::memory_order_relaxed));
  impl_->peer_groups.insert(id, std::move(group));
  return id;
}

Status TransferEngine::remove_peer_group(PeerGroupId group) {
  if (impl_->peer_groups.erase(group)) return {};
  return invalid("remove_peer_group", "no peer group " + std::to_string(group));
}

Result<TransferId> TransferEngine::Impl::post_to_group(const std::shared_ptr<PeerGroup>& members,
                                                       std::vector<std::optional<Part>> parts, EventCallback callback) {
  const TransferId id = next_id.fetch_add(1, std::memory_order_relaxed);
  auto whole = std::make_shared<GroupTransfer>(id, members->members.size(), std::move(callback));
  group_transfers.insert(id, whole);  // before its parts, which may end as soon as they are published
  const auto ended = [this, whole](PeerId peer, const Event& event) {
    whole->ended(peer, event, group_transfers, events, stats);
  };
  struct Posting {
    std::vector<std::pair<std::shared_ptr<Transfer>, Request>> writes;
    std::vector<std::pair<PeerId, Event>> without;  // members that have nothing to wait for
  };
  auto posting = std::make_shared<Posting>();
  posting->writes.reserve(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::shared_ptr<Peer>& peer = members->members[i];
    if (!parts[i]) {
      posting->without.emplace_back(peer->id, Event{.kind = EventKind::kTransferDone});
      continue;
    }
    Status status = parts[i]->ok() ? Status() : Status(parts[i]->error());
    if (status.ok()) {
      auto transfer =
          std::make_shared<Transfer>(next_id.fetch_add(1, std::memory_order_relaxed), peer,
                                     [ended, peer_id = peer->id](const Event& event) { ended(peer_id, event); });
      status = publish(transfer);
      if (status.ok()) {
        whole->parts.push_back(transfer->id);
        posting->writes.emplace_back(std::move(transfer), std::move(parts[i]->value()));
        continue;
      }
    }
    posting->without.emplace_back(peer->id, Event{.kind = EventKind::kTransferFailed, .error = status.error()});
  }
  worker.submit<Call>([this, posting, ended] {
    for (auto& [transfer, request] : posting->writes) {
      group.scheduler().add(*transfer, std::make_shared<Request>(std::move(request)));
      group.scheduler().seal(*transfer);
    }
    for (const auto& [peer, event] : posting->without) ended(peer, event);
  });
  return id;
}

Result<TransferId> TransferEngine::scatter(PeerGroupId group, RegionId source, const std::vector<ScatterSlice>& slices,
                                           EventCallback callback) {
  constexpr const char* kOperation = "scatter";
  const Result<std::shared_ptr<PeerGroup>> found = impl_->find_group(group, slices.size(), kOperation);
  if (!found) return found.error();
  const std::shared_ptr<LocalRegion> from = impl_->regions.find(source);
  if (from == nullptr) {
    return Impl::unknown_region(kOperation, "no local region " + std::to_string(source));
  }
  std::vector<std::optional<Impl::Part>> parts(slices.size());
  for (size_t i = 0; i < slices.size(); ++i) {
    const ScatterSlice& slice = slices[i];
    const Peer& peer = *found.value()->members[i];
    if (slice.bytes == 0) {
      if (slice.immediate) parts[i] = Request(nullptr, nullptr, 0, slice.immediate, ImmediateOnly{1});
      continue;
    }
    const auto fits = [&](uint64_t offset, uint64_t region) {
      return slice.bytes <= region && offset <= region - slice.bytes;
    };
    const std::shared_ptr<const RemoteRegion> target = impl_->remote_regions.find(slice.target);
    if (target != nullptr && target->peer != peer.id) {
      return invalid(kOperation, "region " + std::to_string(slice.target) + " belongs to another peer than member " +
                                     std::to_string(i) + " (" + peer.name + ")");
    }
    if (!fits(slice.source_offset, from->bytes) || (target != nullptr && !fits(slice.target_offset, target->bytes))) {
      return Error{ErrorCode::kOutOfRange,
                   {},
                   peer.name,
                   kOperation,
                   std::to_string(slice.bytes) + " bytes from offset " + std::to_string(slice.source_offset) +
                       " to offset " + std::to_string(slice.target_offset) + " lie outside a region"};
    }
    if (target != nullptr) {
      parts[i] =
          Request(from, target, slice.bytes, slice.immediate, SingleWrite{slice.source_offset, slice.target_offset});
      continue;
    }
    // The regions of a fenced peer are forgotten with it: that member's failure. Else it is the caller's mistake.
    if (peer.state.load(std::memory_order_acquire) == Peer::State::kConnected) {
      return Impl::unknown_region(kOperation, "no imported region " + std::to_string(slice.target));
    }
    parts[i] =
        Error{ErrorCode::kUnknownPeer, peer.provider, peer.name, kOperation, "this peer was fenced, or has left"};
  }
  return impl_->post_to_group(found.value(), std::move(parts), std::move(callback));
}

Result<TransferId> TransferEngine::barrier(PeerGroupId group, const std::vector<uint32_t>& immediates,
                                           EventCallback callback) {
  const Result<std::shared_ptr<PeerGroup>> found = impl_->find_group(group, immediates.size(), "barrier");
  if (!found) return found.error();
  std::vector<std::optional<Impl::Part>> parts;
  parts.reserve(immediates.size());
  for (const uint32_t immediate : immediates) {
    parts.emplace_back(Request(nullptr, nullptr, 0, immediate, ImmediateOnly{1}));
  }
  return impl_->post_to_group(found.value(), std::move(parts), std::move(callback));
}

// --- Messages

Result<TransferId> TransferEngine::send(PeerId peer_id, std::span<const std::byte> message, EventCallback callback) {
  if (message.empty() || message.size() > kMaxUserMessageBytes) {
    return invalid("send", "a message of " + std::to_string(message.size()) + " bytes; 1 to " +
                               std::to_string(kMaxUserMessageBytes) + " are possible: write larger things");
  }
  const Result<std::shared_ptr<Transfer>> made =
      impl_->make_transfer(peer_id, std::move(callback), Transfer::Kind::kMessage);
  if (!made) return made.error();
  const std::shared_ptr<Transfer>& transfer = made.value();
  if (transfer->peer->messages.load(std::memory_order_relaxed) > kMaxPendingSends) {
    return Error{ErrorCode::kResources, transfer->peer->provider, transfer->peer->name, "send",
                 std::to_string(kMaxPendingSends) + " messages to this peer wait already: it does not take them"};
  }
  if (Status status = impl_->publish(transfer); !status) return status.error();
  Bytes bytes(kUserHeaderBytes + message.size());
  std::copy(message.begin(), message.end(), bytes.begin() + kUserHeaderBytes);
  auto request =
      std::make_shared<Request>(nullptr, nullptr, 0, std::optional<uint32_t>{}, MessageWrite{std::move(bytes)});
  impl_->worker.submit<AddRequest>(transfer, std::move(request), true);
  return transfer->id;
}

std::vector<Message> TransferEngine::receive(size_t max) {
  bool wake = false;
  std::vector<Message> messages = impl_->messages.take(max, wake);
  if (wake) impl_->waker->wake();
  return messages;
}

Result<Message> TransferEngine::wait_message(Timeout timeout) {
  if (impl_->worker.on_thread()) return Worker::blocking_in_callback("wait_message");
  bool wake = false;
  Result<Message> message = impl_->messages.wait(timeout, wake);
  if (wake) impl_->waker->wake();
  return message;
}

int TransferEngine::message_fd() const { return impl_->messages.fd(); }

Status TransferEngine::set_message_callback(MessageCallback callback) {
  return impl_->worker.call("set_message_callback", [&]() -> Status {
    impl_->group.set_message_callback(std::move(callback));
    return {};
  });
}

// --- Counting

Result<CounterSet> TransferEngine::alloc_counters(uint32_t n) {
  if (n == 0) return invalid("alloc_counters", "0 counters asked for");
  return impl_->counters.allocate(n);
}

Status TransferEngine::expect(CounterSetId set, const std::vector<uint64_t>& targets, EventCallback callback) {
  Result<std::optional<CounterSets::Fired>> fired = impl_->counters.expect(set, targets, std::move(callback));
  if (!fired) return fired.error();
  if (!fired.value()) return {};
  if (fired.value()->callback) {
    impl_->worker.submit<Fire>(std::move(*fired.value()));
  } else {
    impl_->events.push(Event{.kind = EventKind::kCountersReached, .id = set});
  }
  return {};
}

Result<std::vector<uint64_t>> TransferEngine::counter_values(CounterSetId set) { return impl_->counters.values(set); }

Status TransferEngine::release_counters(CounterSetId set) {
  if (Status status = impl_->counters.release(set); !status) return status;
  impl_->events.discard(EventQueue::Subject::kCounters, set);
  return {};
}

// --- Waiting

Result<Event> TransferEngine::wait_transfer(TransferId id, Timeout timeout) {
  if (impl_->worker.on_thread()) return Worker::blocking_in_callback("wait_transfer");
  const std::shared_ptr<Transfer> transfer = impl_->transfers.find(id);
  const std::shared_ptr<GroupTransfer> group = impl_->group_transfers.find(id);
  if ((transfer != nullptr && transfer->callback) || (group != nullptr && group->has_callback())) {
    return invalid("wait_transfer", "transfer " + std::to_string(id) + " has a callback, which gets its event");
  }
  return impl_->events.wait(EventQueue::Subject::kTransfer, id, timeout, [&] {
    return impl_->transfers.find(id) != nullptr || impl_->group_transfers.find(id) != nullptr;
  });
}

Result<Event> TransferEngine::wait_counters(CounterSetId set, Timeout timeout) {
  if (impl_->worker.on_thread()) return Worker::blocking_in_callback("wait_counters");
  return impl_->events.wait(EventQueue::Subject::kCounters, set, timeout, [&] { return impl_->counters.exists(set); });
}

std::vector<Event> TransferEngine::poll_events(size_t max) { return impl_->events.poll(max); }
int TransferEngine::event_fd() const { return impl_->events.fd(); }

// --- The rest

std::shared_ptr<LayerSignal> TransferEngine::create_signal() {
  // The waker is shared: a signal may outlive the engine.
  return std::make_shared<LayerSignal>([waker = impl_->waker] { waker->wake(); });
}

Result<std::shared_ptr<cuda::StreamSignal>> TransferEngine::create_stream_signal() {
  return cuda::StreamSignal::create([waker = impl_->waker] { waker->wake(); });
}

EngineStats TransferEngine::stats() const {
  const auto load = [](const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  const Stats& stats = impl_->stats;
  return EngineStats{.pages_written = load(stats.pages_written),
                     .bytes_written = load(stats.bytes_written),
                     .batches_posted = load(stats.batches_posted),
                     .immediates_received = load(stats.immediates_received),
                     .immediates_stale = load(stats.immediates_stale),
                     .links_lost = load(stats.links_lost),
                     .links_restored = load(stats.links_restored),
                     .pages_rewritten = load(stats.pages_rewritten),
                     .sleeps = load(stats.sleeps),
                     .callback_errors = load(stats.callback_errors),
                     .transfers_open = impl_->transfers.size(),
                     .counters_allocated = impl_->counters.allocated(),
                     .peers = impl_->peers.size(),
                     .regions = impl_->regions.size()};
}

const EngineConfig& TransferEngine::config() const { return impl_->config; }
const std::vector<std::string>& TransferEngine::domains() const { return impl_->group.descriptions(); }
const std::vector<Error>& TransferEngine::unusable() const { return impl_->group.unusable(); }

}  // namespace kvc
