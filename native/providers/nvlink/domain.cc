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

// Ending a link waits so long for the copies under way: a few hundred microseconds normally. A GPU that needs longer,
// because kernels of a higher priority leave the copies no SM, is waited for by and by, and the peer's fence with it.
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

NvlinkDomain::NvlinkDomain(const DomainConfig& config, DomainSink& sink, std::optional<uint64_t> process)
    : copy_blocks_(config.copy_blocks),
      process_(process.value_or(process_mark())),
      sink_(sink),
      rendezvous_(kLane, [this](same_host::Newcomer newcomer) { welcome(std::move(newcomer)); }) {}

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
  board().process = process_;
  return {};
}

std::string NvlinkDomain::description() const {
  return "nvlink pid " + std::to_string(getpid()) + (context_ ? " GPU " + std::to_string(context_->device()) : "");
}

// --- Links

Link* NvlinkDomain::find(LinkId link) noexcept {
  const auto found = links_.find(link);
  return found == links_.end() ? nullptr : found->second.get();
}

Result<Bytes> NvlinkDomain::offer(LinkId link) {
  if (find(link) != nullptr) return kLane.error(ErrorCode::kInvalidArgument, "offer", "this link exists");
  const Result<same_host::Invitation> invitation = rendezvous_.invite();
  if (!invitation) return invitation.error();
  auto created = std::make_unique<Link>(link, sink_, rendezvous_.epoll());
  created->connection().expect(invitation.value().secret);
  links_.emplace(link, std::move(created));
  return to_bytes(Offer{invitation.value(), process_});
}

Result<Bytes> NvlinkDomain::accept(LinkId id, std::span<const std::byte> bytes) {
  constexpr std::string_view kOperation = "accept";
  if (find(id) != nullptr) return kLane.error(ErrorCode::kInvalidArgument, kOperation, "this link exists");
  // First what every version of an offer begins with, which says what the peer's is.
  const auto invitation =
      from_bytes<same_host::Invitation>(bytes.first(std::min(bytes.size(), sizeof(same_host::Invitation))), kMagic);
  const std::optional<Offer> offer = from_bytes<Offer>(bytes, kMagic);
  if (invitation) {
    if (Status fits = rendezvous_.check(*invitation); !fits) return fits.error();
  }
  if (!offer) return kLane.error(ErrorCode::kInvalidArgument, kOperation, "malformed offer");
  if (context_ == nullptr) {
    return kLane.error(ErrorCode::kInvalidArgument, kOperation, "register GPU memory before connecting to peers");
  }

  Result<same_host::PeerSocket> peer = rendezvous_.dial(*offer);
  if (!peer) return peer.error();
  Result<same_host::Mapping> segment = rendezvous_.say_hello(peer.value(), offer->secret);
  if (!segment) return segment.error();
  auto link = std::make_unique<Link>(id, sink_, rendezvous_.epoll());
  if (Status attached = link->attach(std::move(peer.value()), std::move(segment.value()), Connection::Role::kAcceptor,
                                     offer->process == process_);
      !attached) {
    return attached.error();
  }
  tell_memories(*link);
  link->send_piece(*driver_);  // so that the peer finds out now whether it can map our memory, and not after complete()
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
  if (Status heard = link->service(); !heard) return heard;
  for (bool more = true; more;) {
    Result<bool> mapped = link->map_piece(context_);
    if (!mapped) return mapped.error();
    more = mapped.value();
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
  std::vector<WorkId> unfinished;
  if (link.flying()) {
    const Status drained = copier_->drain(kDrainLimit);
    if (!drained && drained.error().code != ErrorCode::kTimeout && !dead_) dead_ = kLane.named(drained.error());
    settle();
    for (Launch& launch : launches_) {
      for (Flight& flight : launch.flights) {
        if (flight.link == link.id() && !std::exchange(flight.completed, true)) unfinished.push_back(flight.work);
      }
    }
  }
  retire_unused(link);
  for (const WorkId work : unfinished) sink_.on_complete(work, &link.close_reason());
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
  const bool same_process = reinterpret_cast<const Board*>(newcomer.board.data())->process == process_;
  if (Status attached =
          link.attach(std::move(newcomer.peer), std::move(newcomer.segment), Connection::Role::kOfferer, same_process);
      !attached) {
    link.close(attached.error());
    return;
  }
  link.connection().meet(std::move(newcomer.board));
  link.tell(Message{.kind = MessageKind::kWelcome}, rendezvous_.board_fd());
  tell_memories(link);
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
  happened |= move_piece();
  happened |= unmap_retired();
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
    if (launch.flights.empty()) {  // the first had to wait for its region
      spare_launches_.push_back(std::move(launch));
      continue;
    }
    any = true;
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

// Moves the link's first batch into the launch; false if it does not fit any more, or has to wait for its region.
bool NvlinkDomain::take(Link& link, Launch& launch) {
  const BatchQueue::Item& batch = link.queue().front();
  if (!copier_->has_room(batch.count)) return false;
  auto target = link.targets().find(batch.rkey);
  if (target == link.targets().end() && link.must_wait()) return false;
  Flight& flight = launch.flights.emplace_back(Flight{link.id(), batch.work, batch.immediate, batch.counted});
  link.enter();
  const RegionEntry& entry = link.board().regions[batch.rkey % kMaxRegions];
  if (link.revoked()) {
    flight.error = kLane.error(ErrorCode::kPeerDown, "write", "the peer has fenced this link");
  } else if (batch.rkey == 0 || entry.rkey.load(std::memory_order_seq_cst) != batch.rkey) {
    flight.error =
        kLane.error(ErrorCode::kUnknownRegion, "write", "the peer has no region of this key, or has revoked it");
    // Memory in pieces goes when the peer says so.
    if (target != link.targets().end() && target->second.memory == 0) {
      retire(std::move(target->second.mapping));
      link.targets().erase(target);
    }
  } else if (target == link.targets().end()) {
    Result<Link::Target> mapped = map(link, entry);
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
    if (!flight.completed) sink_.on_complete(flight.work, &error);
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
  retire_unused(*link);
  if (!status) break_down(*link, status.error());
}

bool NvlinkDomain::prepare_sleep() {
  // The GPU wakes nobody: while it copies, the worker keeps looking.
  if (!launches_.empty() || !retired_.empty()) return false;
  sleep_.announce();
  if (std::none_of(links_.begin(), links_.end(), [this](const auto& entry) {
        return entry.second->has_work() || (context_ != nullptr && entry.second->has_piece_to_map());
      })) {
    return true;
  }
  sleep_.end();
  return false;
}

// Forgets links that are through. Not where they end: that may be in the middle of their own work.
void NvlinkDomain::reap() {
  std::erase_if(links_, [](const auto& entry) {
    return entry.second->closed() && entry.second->fenced() && !entry.second->flying();
  });
}

}  // namespace kvc::nvlink
