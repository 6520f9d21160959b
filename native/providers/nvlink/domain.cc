#include "providers/nvlink/domain.h"

#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <chrono>
#include <utility>

namespace kvc::nvlink {

using same_host::Connection;
using same_host::from_bytes;
using same_host::to_bytes;

namespace {

// How often the GPU is asked for errors while copies are under way: 1 us, and never needed in a life without one.
constexpr uint32_t kTurnsPerCheck = 1024;

// Ending a link waits for the copies under way: a few hundred microseconds, or as long as kernels of a higher priority
// leave them no SM. A GPU that needs longer than this hangs.
constexpr auto kDrainLimit = std::chrono::seconds(2);

// One number for all domains of this process, and no other's.
uint64_t process_mark() {
  static const uint64_t mark = [] {
    uint64_t random = 0;
    const Status drawn = same_host::fill_random(std::as_writable_bytes(std::span(&random, 1)));
    return drawn ? random : static_cast<uint64_t>(getpid());
  }();
  return mark;
}

}  // namespace

NvlinkDomain::~NvlinkDomain() {
  copier_.reset();
  links_.clear();
}

Status NvlinkDomain::open() {
  const Result<const cuda::Driver*> driver = cuda::driver();
  if (!driver) return kLane.named(driver.error());
  driver_ = driver.value();
  if (cuda::kernel_image().empty()) {
    return kLane.error(ErrorCode::kRefused, "open",
                       "this build holds no GPU kernels: nvcc was not found when it was built");
  }
  if (Status opened = rendezvous_.open(); !opened) return opened;
  sleep_.attach(board().sleep);
  board().process = process_mark();
  return {};
}

std::string NvlinkDomain::description() const {
  return "nvlink pid " + std::to_string(getpid()) + (context_ ? " GPU " + std::to_string(context_->device()) : "");
}

// --- Memory

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
  constexpr std::string_view kOperation = "register_region";
  if (Status possible = keys_.check(base, bytes); !possible) return possible.error();
  Result<cuda::Placement> placed = cuda::placement(*driver_, base);
  if (!placed) return kLane.named(placed.error());
  const cuda::Placement& place = placed.value();
  if (place.device < 0) {
    return kLane.error(ErrorCode::kInvalidArgument, kOperation,
                       "this memory is in no GPU: the nvlink lane moves GPU memory only (host, tcp: the other kind)");
  }
  const uint64_t offset = reinterpret_cast<uint64_t>(base) - place.allocation;
  if (!place.ipc_capable || bytes > place.allocation_bytes || offset > place.allocation_bytes - bytes) {
    return kLane.error(
        ErrorCode::kRefused, kOperation,
        std::string(place.ipc_capable ? "the region spans several allocations"
                                      : "this GPU memory was allocated so that no other process can map it") +
            ": turn off PYTORCH_CUDA_ALLOC_CONF=expandable_segments and vLLM's sleep mode, which place memory so");
  }
  if (Status adopted = adopt(place.device); !adopted) return adopted.error();
  cuda::IpcHandle handle;
  {
    const cuda::Context::Scope scope(*context_);
    if (int result = driver_->cuIpcGetMemHandle(&handle, place.allocation); result != cuda::kSuccess) {
      Error error = kLane.named(cuda::cuda_error(kOperation, "cuIpcGetMemHandle", result));
      error.code = ErrorCode::kRefused;
      return error;
    }
  }
  Result<uint64_t> taken = keys_.take();
  if (!taken) return taken;
  const uint64_t rkey = taken.value();
  RegionEntry& entry = board().regions[keys_.place(rkey)];
  entry.base.store(reinterpret_cast<uint64_t>(base), std::memory_order_relaxed);
  entry.length.store(bytes, std::memory_order_relaxed);
  entry.offset.store(offset, std::memory_order_relaxed);
  entry.device.store(static_cast<uint64_t>(place.device), std::memory_order_relaxed);
  entry.allocation = handle;
  entry.rkey.store(rkey, std::memory_order_release);
  regions_[rkey] = {};
  return rkey;
}

bool NvlinkDomain::deregister_region(uint64_t rkey) {
  const auto found = regions_.find(rkey);
  if (found == regions_.end()) return true;
  Region& region = found->second;
  if (!region.revoked) {
    region.revoked = true;
    board().regions[keys_.place(rkey)].rkey.store(0, std::memory_order_seq_cst);
    for (const auto& [id, link] : links_) region.landing.emplace_back(id, link->peer_entered());
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

// Where a peer's region lies in this process's address space.
Result<Link::Target> NvlinkDomain::map(const Board& peer, const RegionEntry& entry) {
  const uint64_t base = entry.base.load(std::memory_order_relaxed);
  const uint64_t length = entry.length.load(std::memory_order_relaxed);
  if (peer.process == process_mark()) {
    // Two engines of one process share addresses; their GPUs need access to each other.
    const auto device = static_cast<int>(entry.device.load(std::memory_order_relaxed));
    if (device != context_->device()) {
      Result<std::shared_ptr<cuda::Context>> other = cuda::Context::retain(device);
      if (!other) return kLane.named(other.error());
      const cuda::Context::Scope scope(*context_);
      const int result = driver_->cuCtxEnablePeerAccess(other.value()->handle(), 0);
      if (result != cuda::kSuccess && result != cuda::kPeerAccessAlreadyEnabled) {
        Error error = kLane.named(cuda::cuda_error("accept", "cuCtxEnablePeerAccess", result));
        error.code = ErrorCode::kRefused;
        return error;
      }
    }
    return Link::Target{base, length, nullptr};
  }
  Result<std::shared_ptr<PeerAllocation>> mapping = peer_memory_.open(context_, entry.allocation);
  if (!mapping) return mapping.error();
  const uint64_t offset = entry.offset.load(std::memory_order_relaxed);
  return Link::Target{mapping.value()->base() + offset, length, mapping.value()};
}

// Maps what the peer has registered so far, so that its first write finds it done, and a GPU that cannot be reached is
// found out while another lane can still be chosen.
Status NvlinkDomain::map_all(Link& link) {
  for (const RegionEntry& entry : link.board().regions) {
    const uint64_t rkey = entry.rkey.load(std::memory_order_acquire);
    if (rkey == 0) continue;
    Result<Link::Target> target = map(link.board(), entry);
    if (!target) return target.error();
    link.targets().insert_or_assign(rkey, std::move(target.value()));
  }
  return {};
}

// --- Links

Link* NvlinkDomain::find(LinkId link) noexcept {
  const auto found = links_.find(link);
  return found == links_.end() ? nullptr : found->second.get();
}

Result<Bytes> NvlinkDomain::offer(LinkId link) {
  if (find(link) != nullptr) return kLane.error(ErrorCode::kInvalidArgument, "offer", "this link exists");
  const Result<Offer> offer = rendezvous_.invite();
  if (!offer) return offer.error();
  auto created = std::make_unique<Link>(link, sink_, rendezvous_.epoll());
  created->connection().expect(offer.value().secret);
  links_.emplace(link, std::move(created));
  return to_bytes(offer.value());
}

Result<Bytes> NvlinkDomain::accept(LinkId id, std::span<const std::byte> bytes) {
  constexpr std::string_view kOperation = "accept";
  if (find(id) != nullptr) return kLane.error(ErrorCode::kInvalidArgument, kOperation, "this link exists");
  const std::optional<Offer> offer = from_bytes<Offer>(bytes, kMagic);
  if (!offer) return kLane.error(ErrorCode::kInvalidArgument, kOperation, "malformed offer");
  if (Status fits = rendezvous_.check(*offer); !fits) return fits.error();
  if (context_ == nullptr) {
    return kLane.error(ErrorCode::kInvalidArgument, kOperation, "register GPU memory before connecting to peers");
  }

  Result<same_host::PeerSocket> peer = rendezvous_.dial(*offer);
  if (!peer) return peer.error();
  Result<same_host::Mapping> segment = rendezvous_.say_hello(peer.value(), offer->secret);
  if (!segment) return segment.error();
  auto link = std::make_unique<Link>(id, sink_, rendezvous_.epoll());
  if (Status attached = link->attach(std::move(peer.value()), std::move(segment.value()), Connection::Role::kAcceptor);
      !attached) {
    return attached.error();
  }
  links_.emplace(id, std::move(link));
  return to_bytes(Answer{});
}

Status NvlinkDomain::complete(LinkId id, std::span<const std::byte> bytes) {
  constexpr std::string_view kOperation = "complete";
  Link* link = find(id);
  if (link == nullptr) return kLane.error(ErrorCode::kInvalidArgument, kOperation, "no such offer");
  const std::optional<Answer> answer = from_bytes<Answer>(bytes, kMagic);
  if (!answer) return kLane.error(ErrorCode::kInvalidArgument, kOperation, "malformed answer");
  if (Status fits = kLane.check_version(kOperation, answer->version); !fits) return fits;
  if (context_ == nullptr) {
    return kLane.error(ErrorCode::kInvalidArgument, kOperation, "register GPU memory before connecting to peers");
  }
  if (!link->attached()) rendezvous_.hear_all();
  if (!link->attached() || link->closed()) {
    return kLane.error(ErrorCode::kPeerDown, kOperation, "the peer answered, but its connection is gone");
  }
  return map_all(*link);
}

bool NvlinkDomain::fence(LinkId id) {
  Link* link = find(id);
  if (link == nullptr) return true;
  close(*link, kLane.error(ErrorCode::kPeerDown, "fence", "the link was fenced on this side"));
  return link->fenced();
}

// Ends the link, and with it its batches: those that the GPU has are waited for, because their sources are read.
void NvlinkDomain::close(Link& link, const Error& error) {
  if (link.closed()) return;
  link.close(error);
  const bool flying = std::any_of(launches_.begin(), launches_.end(), [&](const Launch& launch) {
    return std::any_of(launch.flights.begin(), launch.flights.end(),
                       [&](const Flight& flight) { return flight.link == link.id(); });
  });
  if (flying) {
    if (Status drained = copier_->drain(kDrainLimit); !drained && !dead_) dead_ = kLane.named(drained.error());
    settle();
  }
  link.fail_queued();
}

void NvlinkDomain::break_down(Link& link, const Error& error) {
  if (link.closed()) return;
  close(link, error);
  sink_.on_link_down(link.id(), error, link.fenced());
}

// Makes the newcomer the peer of the link whose secret it knows, if there is one.
void NvlinkDomain::welcome(same_host::Newcomer newcomer) {
  const auto found = std::find_if(links_.begin(), links_.end(), [&newcomer](const auto& entry) {
    return entry.second->connection().admit(newcomer.secret);
  });
  if (found == links_.end()) return;
  Link& link = *found->second;
  if (Status attached = link.attach(std::move(newcomer.peer), std::move(newcomer.segment), Connection::Role::kOfferer);
      !attached) {
    link.close(attached.error());
    return;
  }
  link.connection().meet(std::move(newcomer.board));
  link.tell(Message{.kind = MessageKind::kWelcome}, rendezvous_.board_fd());
}

// --- Data path

Posted NvlinkDomain::post(LinkId id, const WriteBatch& batch) {
  Link* link = find(id);
  if (link != nullptr && !dead_) return link->post(batch);
  const Error error = dead_ ? *dead_ : kLane.error(ErrorCode::kPeerDown, "post", "no such link, or it was fenced");
  sink_.on_complete(batch.work, &error);
  return Posted::kYes;
}

Posted NvlinkDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  if (Link* link = find(id)) return link->send(work, message);
  const Error error = kLane.error(ErrorCode::kPeerDown, "send", "no such link, or it was fenced");
  sink_.on_complete(work, &error);
  return Posted::kYes;
}

bool NvlinkDomain::poll() {
  reap();
  sleep_.end();

  bool happened = settle();
  for (const auto& [id, link] : links_) {
    const Result<bool> received = link->receive();
    if (!received) {
      break_down(*link, received.error());
      happened = true;
    } else {
      happened |= received.value();
    }
  }
  happened |= launch();
  for (const auto& [id, link] : links_) happened |= link->flush();

  if (!launches_.empty() && ++turns_ % kTurnsPerCheck == 0) check_health();
  if (sleep_.look_due(happened)) {
    happened |= rendezvous_.serve([this](LinkId id, bool process) { on_event(id, process); });
  }
  return happened;
}

bool NvlinkDomain::launch() {
  bool any = false;
  while (!dead_ && copier_ != nullptr && copier_->can_begin()) {
    // Beginning behind the link that was served last, so that everyone has a turn.
    auto next = links_.upper_bound(last_served_);
    Link* first = nullptr;
    for (size_t i = links_.size(); i > 0 && first == nullptr; --i, ++next) {
      if (next == links_.end()) next = links_.begin();
      if (next->second->can_launch()) first = next->second.get();
    }
    if (first == nullptr) break;
    any = true;
    last_served_ = first->id();
    const uint64_t page_bytes = first->queue().front().page_bytes;
    copier_->begin(page_bytes);
    Launch launch;
    if (!spare_launches_.empty()) {
      launch = std::move(spare_launches_.back());
      spare_launches_.pop_back();
    }
    // One batch of each link in turn, for as long as they fit.
    for (bool more = true; more;) {
      more = false;
      for (const auto& [id, link] : links_) {
        if (link->can_launch() && link->queue().front().page_bytes == page_bytes) more |= take(*link, launch);
      }
    }
    if (Status launched = copier_->launch(); !launched) {
      for (Flight& flight : launch.flights) {
        if (!flight.error) flight.error = kLane.named(launched.error());
      }
    }
    launch.number = copier_->launched();
    launches_.push_back(std::move(launch));
  }
  return any;
}

// Moves the link's first batch into the launch; false if it does not fit any more.
bool NvlinkDomain::take(Link& link, Launch& launch) {
  const BatchQueue::Item& batch = link.queue().front();
  if (!copier_->has_room(batch.count)) return false;
  Flight& flight = launch.flights.emplace_back(Flight{link.id(), batch.work, batch.immediate, batch.counted});
  link.enter();
  const RegionEntry& entry = link.board().regions[batch.rkey % kMaxRegions];
  auto target = link.targets().find(batch.rkey);
  if (link.revoked()) {
    flight.error = kLane.error(ErrorCode::kPeerDown, "write", "the peer has fenced this link");
  } else if (batch.rkey == 0 || entry.rkey.load(std::memory_order_seq_cst) != batch.rkey) {
    flight.error =
        kLane.error(ErrorCode::kUnknownRegion, "write", "the peer has no region of this key, or has revoked it");
    if (target != link.targets().end()) link.targets().erase(target);
  } else if (target == link.targets().end()) {
    Result<Link::Target> mapped = map(link.board(), entry);
    if (mapped) {
      target = link.targets().emplace(batch.rkey, std::move(mapped.value())).first;
    } else {
      flight.error = mapped.error();
    }
  }
  if (!flight.error) {
    const uint64_t bytes = target->second.bytes;
    for (const PageWrite& page : batch.all()) {
      if (batch.page_bytes <= bytes && page.target_offset <= bytes - batch.page_bytes) continue;
      flight.error = kLane.error(ErrorCode::kOutOfRange, "write",
                                 std::to_string(batch.page_bytes) + " bytes at " + std::to_string(page.target_offset) +
                                     " do not fit the peer's region of " + std::to_string(bytes));
      break;
    }
  }
  if (!flight.error) {
    for (const PageWrite& page : batch.all()) {
      copier_->add(reinterpret_cast<uint64_t>(page.source), target->second.base + page.target_offset);
    }
  }
  link.queue().pop();
  return true;
}

// Ends the launches that the GPU has finished.
bool NvlinkDomain::settle() {
  bool any = false;
  while (!launches_.empty() && (dead_ || copier_->finished() >= launches_.front().number)) {
    any = true;
    Launch launch = std::move(launches_.front());
    launches_.pop_front();  // before the sink may fence a link, which settles too
    for (Flight& flight : launch.flights) end(flight);
    launch.flights.clear();
    spare_launches_.push_back(std::move(launch));
  }
  return any;
}

void NvlinkDomain::end(Flight& flight) {
  Link* link = find(flight.link);
  assert(link != nullptr && "links go in reap() only, and not with flights under way");
  if (dead_ && !flight.error) flight.error = *dead_;
  if (link->closed()) {
    // What it was refused for before says more than that the link has ended.
    const Error error = flight.error ? *flight.error : link->close_reason();
    link->leave();
    sink_.on_complete(flight.work, &error);
    return;
  }
  if (flight.error) {
    const bool fenced_by_peer = flight.error->code == ErrorCode::kPeerDown;
    link->leave();
    sink_.on_complete(flight.work, &*flight.error);
    if (fenced_by_peer) break_down(*link, *flight.error);
    return;
  }
  link->land(flight.work, flight.counted, flight.immediate);
  link->leave();
}

void NvlinkDomain::check_health() {
  const Status healthy = copier_->health();
  if (healthy) return;
  dead_ = kLane.named(healthy.error());
  settle();
  for (const auto& [id, link] : links_) break_down(*link, *dead_);
}

void NvlinkDomain::on_event(LinkId id, bool process) {
  Link* link = find(id);
  if (link == nullptr) return;
  const bool met = link->met();
  Status status =
      process ? Status(kLane.error(ErrorCode::kPeerDown, "link", "the peer's process is gone")) : link->service();
  if (status && !met && link->met()) status = map_all(*link);
  if (!status) break_down(*link, status.error());
}

bool NvlinkDomain::prepare_sleep() {
  // The GPU wakes nobody: while it copies, the worker keeps looking.
  if (!launches_.empty()) return false;
  sleep_.announce();
  if (std::none_of(links_.begin(), links_.end(), [](const auto& entry) { return entry.second->has_work(); })) {
    return true;
  }
  sleep_.end();
  return false;
}

// Forgets links that are through. Not where they end: that may be in the middle of their own work.
void NvlinkDomain::reap() {
  std::erase_if(links_, [](const auto& entry) { return entry.second->closed() && entry.second->fenced(); });
}

}  // namespace kvc::nvlink
