#include "providers/nvlink/link.h"

#include <sys/socket.h>

#include <string>
#include <vector>

#include "base/process.h"

namespace kvc::nvlink {

using same_host::Admission;
using same_host::Taken;
using Put = same_host::ImmediateRing::Put;

namespace {

// Unmaps the peer's memory, on the control thread, when no copy uses it any more. The socket's end shows the peer that
// no write of this side is in flight either. The socket's other direction stays open: the peer announces the same
// there.
void let_go(std::vector<std::shared_ptr<PeerRegion>> regions, const Connection& connection) {
  regions.clear();
  connection.outgoing<Segment>().let_go.store(kAllLetGo, std::memory_order_seq_cst);
  shutdown(connection.socket().get(), SHUT_WR);
}

}  // namespace

// --- Set-up

Meeting::~Meeting() {
  if (connection != nullptr) let_go(regions.take_all(), *connection);
}

Link::~Link() {
  // Copies that a closed domain did not wait for have ended by now. Everything that has entered has left, and the peer
  // may fence.
  out_.left.store(entered_, std::memory_order_release);
  let_go(regions_.take_all(), *connection_);
}

Link::Link(LinkId id, Meeting& meeting, const LinkContext& context, const cuda::Driver& driver, const Copies& copies)
    : LinkBase(kLane, id, context, meeting.connection, same_host::direction_of(meeting.connection->incoming<Segment>()),
               same_host::direction_of(meeting.connection->outgoing<Segment>()), kQueueDepth),
      driver_(driver),
      copies_(copies),
      in_(connection_->incoming<Segment>()),
      out_(connection_->outgoing<Segment>()),
      regions_(std::move(meeting.regions)),
      pieces_(std::move(meeting.pieces)),
      told_(meeting.told) {
  meeting.connection.reset();
}

void Link::begin(const Regions& ours) {
  bool known = told_ == 0;
  for (const auto& [place, region] : ours) {
    known |= region->key == told_;
    if (region->key != told_) tell(*region);
  }
  if (!known) pieces_.forget(told_);  // the region was withdrawn meanwhile
  LinkBase::begin();
}

// --- Our memory

void Link::tell(const Region& region) {
  if (region.shared.pieces && !regions_.same_process() && !closed_) pieces_.tell(region.key, region.shared.pieces);
}

Region::User Link::revoke(uint64_t key) {
  const uint64_t entered = in_.entered.load(std::memory_order_seq_cst);
  // Over an ended link the peer receives no more messages: it unmaps everything.
  return {id_, entered, closed_ ? kAllLetGo : regions_.same_process() ? 0 : pieces_.forget(key)};
}

// A peer that is gone closes its link; over() notices that.
bool Link::has_left(const Region::User& user) const {
  if (gone_) return true;
  if (!ended_ && !peer_left(user.entered)) return false;
  return regions_.same_process() || in_.let_go.load(std::memory_order_acquire) >= user.forgets;
}

// --- Control messages

void Link::process_ended() { lose_peer(peer_down("link", "the peer's process is gone")); }

bool Link::handle(const Message& message, Connection::Descriptors& descriptors) {
  switch (message.kind) {
    case MessageKind::kWake:
      return true;
    case MessageKind::kWelcome:
      return connection_->meet(descriptors);
    case MessageKind::kMemory:
      return met() && regions_.hear(message, std::move(descriptors[0]), board(), context_.control);
    case MessageKind::kForget:
      return regions_.forget(message, copies_.next_launch());
    case MessageKind::kNone:
    case MessageKind::kHello:
      break;  // valid as a first message only, which the rendezvous reads
  }
  return false;
}

// --- Sending

Posted Link::post(const WriteBatch& batch) {
  if (closed_) {
    context_.completions.failed(batch.work, *closed_);
    return Posted::kYes;
  }
  if (queue_.full()) return Posted::kBusy;
  queue_.push(batch);
  return Posted::kYes;
}

Posted Link::send(WorkId work, std::span<const std::byte> message) {
  if (closed_) {
    context_.completions.failed(work, *closed_);
    return Posted::kYes;
  }
  if (!messages_.put(work, message)) return Posted::kBusy;
  wake_due_ = true;
  return Posted::kYes;
}

bool Link::still_waits() const noexcept {
  if (out_.admitted() == Admission::kPending) return true;
  const BatchQueue::Item& batch = queue_.front();
  return batch.page_bytes > 0 && board().find(batch.rkey) != nullptr && regions_.awaits(batch.rkey);
}

std::optional<Flight> Link::take(cuda::Copier& copier) {
  const BatchQueue::Item& batch = queue_.front();
  if (!copier.has_room(batch.count)) return std::nullopt;
  waiting_ = out_.admitted() == Admission::kPending;
  const PeerRegion* region = nullptr;
  if (const RegionEntry* entry = board().find(batch.rkey); entry != nullptr && batch.page_bytes > 0 && !waiting_) {
    region = regions_.find(batch.rkey, *entry, context_.control);
    waiting_ = region == nullptr || region->state() == PeerRegion::State::kComing;
  }
  if (waiting_) return std::nullopt;
  Flight flight{id_, batch.work, batch.immediate, batch.counted};
  // From here on the batch counts as landing. Only now is its right to land checked.
  out_.entered.store(++entered_, std::memory_order_seq_cst);
  flight.error = refuse(batch, region);
  if (!flight.error && batch.page_bytes > 0) {
    for (const PageWrite& page : batch.all()) {
      copier.add(reinterpret_cast<uint64_t>(page.source), region->base() + page.target_offset);
    }
  }
  queue_.pop();
  return flight;
}

std::optional<Error> Link::refuse(const BatchQueue::Item& batch, const PeerRegion* region) const {
  if (out_.admitted() != Admission::kOpen) return peer_down("write", "the peer has fenced this link");
  if (batch.page_bytes == 0) return std::nullopt;
  if (region == nullptr || board().find(batch.rkey) == nullptr) {
    return kLane.error(ErrorCode::kUnknownRegion, "write", "the peer has no region of this key, or has revoked it");
  }
  if (region->state() == PeerRegion::State::kFailed) return region->error();
  for (const PageWrite& page : batch.all()) {
    if (fits(page.target_offset, batch.page_bytes, region->bytes)) continue;
    return kLane.error(ErrorCode::kOutOfRange, "write",
                       std::to_string(batch.page_bytes) + " bytes at " + std::to_string(page.target_offset) +
                           " do not fit the peer's region of " + std::to_string(region->bytes));
  }
  return std::nullopt;
}

void Link::land(Flight flight) {
  landed_.push_back(std::move(flight));
  settle_landed();
}

bool Link::settle_landed() {
  bool any = false;
  for (; !landed_.empty(); any = true) {
    Flight& flight = landed_.front();
    if (!flight.error && closed_) flight.error = *closed_;
    if (!flight.error && flight.counted) {
      const Put put = ring_.put(flight.immediate);
      if (put == Put::kFull) break;
      if (put == Put::kOverwritten) flight.error = overwritten("receive");
      wake_due_ = true;
    }
    same_host::handing_over();
    out_.left.store(++left_, std::memory_order_release);
    if (!flight.error) {
      context_.completions.done(flight.work);
    } else {
      if (flight.error->code == ErrorCode::kPeerDown) break_down(*flight.error);
      context_.completions.failed(flight.work, std::move(*flight.error));
    }
    landed_.pop_front();
  }
  return any;
}

// --- Receiving

void Link::take_message(uint32_t slot) noexcept {
  messages_.take(slot);
  wake_due_ = true;
}

// --- Each turn

bool Link::flush() {
  bool any = settle_landed();
  if (closed_) return any;
  // A region is mapped only after the peer's domain has the link. From then on the peer can notify this side when its
  // memory goes.
  if (met() && out_.admitted() == Admission::kOpen) any |= regions_.prefetch(board(), context_.control);
  if (regions_.advance(out_, context_.control, [this](uint64_t launch) { return copies_.settled(launch); })) {
    wake_due_ = any = true;
  }
  if (const Error* why = regions_.useless()) {
    break_down(*why);
    return true;
  }
  if (!socket_full_) {
    const uint64_t taken = in_.pieces_taken.load(std::memory_order_seq_cst);
    const PieceSender::Sent sent = pieces_.advance(driver_, *connection_, taken, context_.control);
    if (sent == PieceSender::Sent::kFull) wait_for_room();
    any |= sent == PieceSender::Sent::kSome;
  }
  // Wakes the peer once a turn and not once a batch: waking a process costs as much as copying many pages. If the
  // socket is full, it holds messages for the peer, which wakes up without this one.
  if (met() && std::exchange(wake_due_, false) && connection_->begin_wake()) {
    connection_->send({.kind = MessageKind::kWake});
  }
  return any;
}

bool Link::has_work() const noexcept {
  if (closed_) return !landed_.empty();
  if (ring_.has_arrivals() || messages_.has_work() || regions_.must_let_go()) return true;
  if (!landed_.empty() && ring_.may_have_room()) return true;
  if (!socket_full_ && pieces_.has_work(in_.pieces_taken.load(std::memory_order_seq_cst))) return true;
  if (!met()) return false;
  return wake_due_ || can_launch() || (out_.admitted() == Admission::kOpen && regions_.may_prefetch(board()));
}

// --- The end

bool Link::end() {
  if (ended_) return true;
  settle_landed();
  // A batch leaves when its immediate is in the ring. A peer that waits for room there gets it.
  if (ring_.receive() == Taken::kSome && ring_.starves_peer()) connection_->send({.kind = MessageKind::kWake});
  if (entered_ != left_) return false;
  // If a pidfd exists, the socket's end is not enough: when a process dies, the socket may end before the process's
  // work on the GPU does.
  if (!peer_left(entered_at_close_) && !connection_->peer_is_gone()) return false;
  ring_.drain();
  ended_ = true;
  context_.control.run(
      [regions = regions_.take_all(), connection = connection_]() mutable { let_go(std::move(regions), *connection); });
  return true;
}

bool Link::over() {
  if (!closed_) return false;
  const UniqueFd& process = connection_->process();
  // A peer whose domain never had the link has hung up without a message.
  gone_ = gone_ || is_gone(process) || ((!process || out_.admitted() == Admission::kPending) && connection_->hung_up());
  const bool let_go = in_.let_go.load(std::memory_order_acquire) == kAllLetGo;
  return ended_ && (gone_ || let_go || regions_.same_process());
}

bool Link::peer_left(uint64_t entered) const noexcept {
  // The difference is signed. So a peer that scribbles only makes this side wait for the peer's process to end.
  if (static_cast<int64_t>(in_.left.load(std::memory_order_acquire) - entered) < 0) return false;
  same_host::taking_over();
  return true;
}

}  // namespace kvc::nvlink
