#include "providers/nvlink/link.h"

#include <utility>

#include "engine/immediate.h"

namespace kvc::nvlink {

using same_host::Received;
using same_host::Taken;

namespace {

Error overwritten() {
  return kLane.error(ErrorCode::kPeerDown, "receive", "the peer has overwritten the link's control words");
}

}  // namespace

// --- Set-up

Link::~Link() {
  if (in_ != nullptr) in_->revoked.store(1, std::memory_order_seq_cst);
}

Status Link::attach(same_host::PeerSocket peer, Mapping segment, Connection::Role role, bool same_process) {
  same_process_ = same_process;
  Status attached = connection_.attach(std::move(peer), std::move(segment), role);
  in_ = &connection_.incoming<Segment>();
  out_ = &connection_.outgoing<Segment>();
  ring_.attach(same_host::direction_of(*in_), same_host::direction_of(*out_));
  messages_.attach(same_host::direction_of(*in_), same_host::direction_of(*out_));
  return attached;
}

// --- Control messages

void Link::tell(const Message& message, int descriptor) {
  if (closed_) return;
  // Not kYes: the peer has hung up, which service() reads; or its socket is full of wake-ups, and this one is not needed.
  // The one message with a descriptor is the first of all, for which there is room.
  connection_.send(message, {&descriptor, descriptor >= 0 ? 1U : 0U});
}

Status Link::service() {
  if (closed_ || !attached()) return {};
  const Received last = connection_.receive([this](const Message& message, Connection::Descriptors& descriptors) {
    switch (message.kind) {
      case MessageKind::kWake:
        return true;
      case MessageKind::kWelcome:
        return connection_.meet(descriptors);
      case MessageKind::kMemory:
        return met() && pieces_in_.hear(message, std::move(descriptors[0]));
      case MessageKind::kForget:
        forget_peer_memory(message.memory);
        return true;
      case MessageKind::kNone:
      case MessageKind::kHello:
        break;  // only ever the first message, and read by the rendezvous
    }
    return false;
  });
  if (last == Received::kClosed || last == Received::kMalformed) return connection_.what_ended(last);
  return {};
}

// --- Memory in pieces

void Link::tell_memory(uint32_t memory, PieceSender::Pieces pieces) {
  if (!closed_ && !same_process_) pieces_out_.tell(memory, std::move(pieces));
}

void Link::forget_memory(uint32_t memory) {
  if (!closed_ && !same_process_) pieces_out_.forget(memory);
}

uint64_t Link::pieces_taken() const noexcept { return in_->pieces_taken.load(std::memory_order_seq_cst); }

bool Link::send_piece(const cuda::Driver& driver) {
  return !closed_ && attached() && pieces_out_.advance(driver, connection_, pieces_taken());
}

Result<bool> Link::map_piece(const std::shared_ptr<cuda::Context>& context) {
  if (!has_piece_to_map()) return false;
  if (!pieces_in_.map_next(context, board())) return connection_.what_ended(Received::kMalformed);
  out_->pieces_taken.store(pieces_in_.taken(), std::memory_order_seq_cst);
  wake_due_ = true;
  // The first thing that the peer's memory is asked for: no other will work, and the link is of no use.
  if (const Error* why = pieces_in_.cannot_map(); why != nullptr && targets_.empty()) return *why;
  return true;
}

bool Link::awaits(const RegionEntry& entry) const noexcept {
  const auto memory = static_cast<uint32_t>(entry.memory.load(std::memory_order_relaxed));
  if (memory == 0 || same_process_) return false;
  const PieceReceiver::Memory* found = pieces_in_.find(memory);
  return found == nullptr || !found->arrived();
}

bool Link::awaits(uint64_t rkey) const noexcept {
  const RegionEntry& entry = board().regions[rkey % kMaxRegions];
  return rkey != 0 && entry.rkey.load(std::memory_order_seq_cst) == rkey && awaits(entry);
}

void Link::forget_peer_memory(uint32_t memory) {
  std::optional<PieceReceiver::Memory> forgotten = pieces_in_.forget(memory);
  out_->pieces_taken.store(pieces_in_.taken(), std::memory_order_seq_cst);
  wake_due_ = true;
  if (!forgotten) return;
  targets_.erase(forgotten->rkey);
  set_aside(std::move(*forgotten));
}

void Link::set_aside(PieceReceiver::Memory memory) {
  if (memory.allocation) unused_.push_back(std::move(memory.allocation));
}

// --- Sending

Posted Link::post(const WriteBatch& batch) {
  if (closed_) {
    sink_.on_complete(batch.work, &*closed_);
    return Posted::kYes;
  }
  const size_t count = batch.pages.size();
  if (count == 0 || count > Immediate::kMaxMultiplicity) {
    const Error error = kLane.error(ErrorCode::kInvalidArgument, "post", "a batch has 1 to 64 pages");
    sink_.on_complete(batch.work, &error);
    return Posted::kYes;
  }
  if (batch.page_bytes == 0) {
    if (!attached()) return Posted::kBusy;
    land(batch.work, batch.counted, batch.immediate);
    return Posted::kYes;
  }
  if (queue_.full()) return Posted::kBusy;
  queue_.push(batch);
  return Posted::kYes;
}

Posted Link::send(WorkId work, std::span<const std::byte> message) {
  if (closed_) {
    sink_.on_complete(work, &*closed_);
    return Posted::kYes;
  }
  if (message.empty() || message.size() > kMaxMessageBytes) {
    const Error error = kLane.error(ErrorCode::kInvalidArgument, "send", "a message has 1 to 4096 bytes");
    sink_.on_complete(work, &error);
    return Posted::kYes;
  }
  if (!attached()) return Posted::kBusy;
  if (!messages_.put(work, message)) return Posted::kBusy;
  wake_due_ = true;
  return Posted::kYes;
}

void Link::land(WorkId work, bool counted, uint32_t immediate) {
  if (counted && (!uncounted_.empty() || !put_immediate(immediate))) {
    uncounted_.push_back({work, immediate});
    return;
  }
  sink_.on_complete(work, nullptr);
}

bool Link::put_immediate(uint32_t immediate) {
  if (ring_.put(immediate) != same_host::ImmediateRing::Put::kYes) return false;
  wake_due_ = true;
  return true;
}

bool Link::flush() {
  if (closed_ || !attached()) return false;
  bool any = messages_.complete();
  while (!closed_ && !uncounted_.empty() && put_immediate(uncounted_.front().immediate)) {
    const WorkId work = uncounted_.front().work;
    uncounted_.pop_front();  // before the sink may post again
    sink_.on_complete(work, nullptr);
    any = true;
  }
  // Once a turn and not once a batch: waking a process costs as much as copying many pages.
  if (!closed_ && met() && std::exchange(wake_due_, false) && connection_.begin_wake()) {
    tell(Message{.kind = MessageKind::kWake});
  }
  return any;
}

// --- Receiving

Result<bool> Link::receive() {
  if (closed_ || !attached()) return false;
  const Taken immediates = ring_.receive();
  if (immediates == Taken::kOverwritten) return overwritten();
  if (immediates == Taken::kSome && ring_.starves_peer()) tell(Message{.kind = MessageKind::kWake});
  const Taken messages = closed_ ? Taken::kNothing : messages_.receive();
  if (messages == Taken::kOverwritten) return overwritten();
  wake_due_ |= messages == Taken::kSome;  // flush() follows in the same turn
  return immediates == Taken::kSome || messages == Taken::kSome;
}

bool Link::has_work() const noexcept {
  if (closed_ || !attached()) return false;
  if (ring_.has_arrivals() || messages_.has_work()) return true;
  if (!uncounted_.empty() && ring_.may_have_room()) return true;
  if (pieces_out_.has_work(pieces_taken())) return true;
  return can_launch() || (wake_due_ && met());
}

// --- The end

void Link::close(const Error& error) {
  if (closed_) return;
  closed_ = error;
  ring_.close();
  if (attached()) {
    in_->revoked.store(1, std::memory_order_seq_cst);
    entered_at_close_ = peer_entered();
  }
  connection_.stop();
  pieces_out_.close();
  for (PieceReceiver::Memory& memory : pieces_in_.close()) set_aside(std::move(memory));
  for (auto& [rkey, target] : targets_) {
    if (target.mapping && target.memory == 0) unused_.push_back(std::move(target.mapping));
  }
  targets_.clear();
}

void Link::fail_queued() {
  while (!queue_.empty()) {
    const WorkId work = queue_.front().work;
    queue_.pop();
    sink_.on_complete(work, &*closed_);
  }
  while (!uncounted_.empty()) {
    const WorkId work = uncounted_.front().work;
    uncounted_.pop_front();
    sink_.on_complete(work, &*closed_);
  }
  messages_.close(*closed_);
}

bool Link::fenced() {
  if (!fenced_ && closed_ && (!attached() || peer_left(entered_at_close_))) {
    fenced_ = true;
    if (attached()) ring_.drain();
  }
  // To a peer without a pidfd of ours the end of the socket says that nothing of us is under way.
  if (fenced_ && !flying()) connection_.hang_up();
  return fenced_;
}

uint64_t Link::peer_entered() const noexcept { return attached() ? in_->entered.load(std::memory_order_seq_cst) : 0; }

bool Link::peer_left(uint64_t entered) const {
  if (!attached() || fenced_) return true;
  // A signed difference: a peer that scribbles makes us wait for its process to end, and nothing else.
  if (static_cast<int64_t>(in_->left.load(std::memory_order_acquire) - entered) >= 0) {
    same_host::taking_over();
    return true;
  }
  return connection_.peer_is_gone();
}

}  // namespace kvc::nvlink
