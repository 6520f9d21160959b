#include "providers/verbs/link.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvc::verbs {

using Kind = WorkRequestId::Kind;

namespace {

// Compares two counts modulo 2^16. They are never 2^15 apart, because fewer requests fit into a queue.
bool reached(uint16_t count, uint16_t target) { return static_cast<int16_t>(count - target) >= 0; }

}  // namespace

Link::Link(LinkContext& context, LinkId id, const Connection& connection)
    : context_(context),
      id_(id),
      peer_key_half_(connection.peer_key_half()),
      state_(connection.offering() ? State::kUp : State::kAccepted),
      writes_(connection.writes(), context.credits),
      messages_(connection.messages(), context.credits),
      owes_hello_(connection.offering()),
      writes_end_(connection.writes()),
      messages_end_(connection.messages()) {}

Link::~Link() {
  if (over()) return;
  context_.control.run([writes = writes_.pair(), messages = messages_.pair()] {
    writes->destroy();
    messages->destroy();
  });
}

// --- Writes

Posted Link::post(const WriteBatch& batch) {
  if (!up() || has_rest()) return Posted::kBusy;
  Remainder& posting = context_.posting;
  posting.start(batch, context_.resources.device->max_message());
  // A batch that is too large for the queue is posted in parts. Any other batch waits until there is room for all of
  // it.
  if (writes_.room() < std::min<uint64_t>(posting.pieces(), writes_.pair()->slots() / 2)) return Posted::kBusy;
  if (Status posted = post_pieces(posting); !posted) fault = posted.error();
  if (posting.pieces() > 0) rest_ = std::make_unique<Remainder>(posting);
  return Posted::kYes;
}

bool Link::continue_rest() {
  const uint64_t before = rest_->pieces();
  if (Status posted = post_pieces(*rest_); !posted) fault = posted.error();
  const bool any = rest_->pieces() < before;
  if (rest_->pieces() == 0) rest_.reset();
  return any;
}

Status Link::post_pieces(Remainder& batch) {
  while (batch.pieces() > 0) {
    const auto count =
        static_cast<uint32_t>(std::min({batch.pieces(), uint64_t{writes_.room()}, uint64_t{WriteChain::kLength}}));
    if (count == 0) return {};
    const Remainder::Mark before = batch.mark();
    fill(batch, count);
    Sent sent;
    if (batch.pieces() == 0) {
      sent.work = batch.work();
      sent.landed_at = counted_ + 1;  // a batch without an immediate has landed when the next counted one has
    }
    context_.chain.cut(count);
    Result<uint32_t> taken = writes_.post(&context_.chain.request(0), count, sent);
    context_.chain.mend(count);
    if (taken.ok() && taken.value() == count) {
      if (batch.counted() && batch.pieces() == 0) ++counted_;
      continue;
    }
    batch.rewind(before);
    for (uint32_t i = 0; taken.ok() && i < taken.value(); ++i) batch.next();
    return taken.ok() ? Status() : taken.error();
  }
  return {};
}

void Link::fill(Remainder& batch, uint32_t count) {
  const uint64_t id = WorkRequestId{Kind::kWrite, id_, writes_.next_sequence()}.encode();
  const uint32_t inline_bytes = batch.source() != nullptr && batch.source()->host ? writes_.pair()->inline_bytes() : 0;
  for (uint32_t i = 0; i < count; ++i) {
    const PageRemainder piece = batch.next();
    abi::ibv_send_wr& request = context_.chain.request(i);
    request.wr_id = id;
    request.opcode = abi::IBV_WR_RDMA_WRITE;
    request.send_flags = 0;
    if (batch.empty()) {
      request.num_sge = 0;
      request.wr.rdma.remote_addr = 0;
      request.wr.rdma.rkey = 0;
      continue;
    }
    if (piece.bytes <= inline_bytes) request.send_flags = abi::IBV_SEND_INLINE;
    request.num_sge = 1;
    context_.chain.piece(i) = {piece.source, piece.bytes, batch.source()->lkey()};
    request.wr.rdma.remote_addr = piece.target;
    request.wr.rdma.rkey = batch.rkey();
  }
  abi::ibv_send_wr& last = context_.chain.request(count - 1);
  last.send_flags |= abi::IBV_SEND_SIGNALED;
  // Writes on one queue pair stay in order: when this one arrives, all pieces before it have.
  if (batch.counted() && batch.pieces() == 0) {
    last.opcode = abi::IBV_WR_RDMA_WRITE_WITH_IMM;
    last.imm_data = big_endian(batch.immediate());
  }
}

void Link::ask() {
  if (!up() || has_rest() || !writes_.idle() || writes_.room() == 0) return;
  abi::ibv_send_wr request{};
  request.wr_id = WorkRequestId{Kind::kWrite, id_, writes_.next_sequence()}.encode();
  request.opcode = abi::IBV_WR_RDMA_WRITE;
  request.send_flags = abi::IBV_SEND_SIGNALED;
  if (Result<uint32_t> posted = writes_.post(&request, 1, Sent{}); !posted) fault = posted.error();
}

// --- Messages

bool Link::post_message(std::span<const std::byte> message, const Control& control) {
  abi::ibv_sge piece{};
  abi::ibv_send_wr request{};
  Sent sent;
  if (!message.empty()) {
    sent.buffer = context_.resources.buffers->take();
    if (!sent.buffer) return false;
    std::byte* const copy = context_.resources.buffers->data(*sent.buffer);
    std::memcpy(copy, message.data(), message.size());
    piece = {reinterpret_cast<uint64_t>(copy), static_cast<uint32_t>(message.size()),
             context_.resources.buffers->lkey()};
    request.sg_list = &piece;
    request.num_sge = 1;
  }
  request.wr_id = WorkRequestId{Kind::kMessage, id_, messages_.next_sequence()}.encode();
  request.opcode = abi::IBV_WR_SEND_WITH_IMM;
  request.send_flags = abi::IBV_SEND_SIGNALED;
  request.imm_data = big_endian(control.encode());
  Result<uint32_t> taken = messages_.post(&request, 1, sent);
  if (!taken) fault = taken.error();
  const bool posted = taken.ok() && taken.value() == 1;
  if (sent.buffer && !posted) context_.resources.buffers->give_back(*sent.buffer);
  return posted;
}

bool Link::say(const Control& control) { return can_say() && post_message({}, control); }

Posted Link::send(WorkId work, std::span<const std::byte> message) {
  if (!up() || messages_.room() == 0) return Posted::kBusy;
  const std::optional<uint32_t> slot = sent_messages_.put(work);
  if (!slot) return Posted::kBusy;
  if (post_message(message, {Control::Kind::kMessage, static_cast<uint16_t>(*slot)})) return Posted::kYes;
  if (fault) return Posted::kYes;  // the work ends with the link
  sent_messages_.take(*slot);
  return Posted::kBusy;
}

bool Link::arrived(uint32_t slot) noexcept {
  if (slot >= kMessageSlots || (untaken_ & (1U << slot)) != 0) return false;
  untaken_ |= 1U << slot;
  return true;
}

void Link::take(uint32_t slot) noexcept {
  owes_taken_ |= untaken_ & (1U << slot);
  untaken_ &= ~(1U << slot);
}

bool Link::say_owed() {
  if (owes_hello_ && !say({Control::Kind::kHello})) return false;
  owes_hello_ = false;
  if (owes_taken_ != 0 && !say({Control::Kind::kTaken, static_cast<uint16_t>(owes_taken_)})) return false;
  owes_taken_ = 0;
  return true;
}

// --- The peer's control messages

bool Link::hear_hello() noexcept {
  if (state_ != State::kAccepted) return false;
  state_ = State::kUp;
  return true;
}

bool Link::hear_taken(uint32_t slots, CompletionQueue& out) {
  for (uint32_t left = slots; left != 0; left &= left - 1) {
    const std::optional<WorkId> work = sent_messages_.take(static_cast<uint32_t>(std::countr_zero(left)));
    if (!work) return false;
    out.done(*work);
  }
  return true;
}

// --- Completions of what was posted

std::optional<Sent> Link::completed(const WorkRequestId& request) {
  const std::optional<Sent> sent = queue(request.kind).completed(request.sequence);
  if (sent && sent->buffer) context_.resources.buffers->give_back(*sent->buffer);
  return sent;
}

// --- The end

void Link::end(const Error& why, bool goodbye, Clock::time_point now) {
  if (!ending()) {
    goodbye = goodbye && up() && !(failure_ && failure_->request.kind == Kind::kMessage);
    state_ = State::kEnding;
    why_ = why;
    why_.code = ErrorCode::kPeerDown;  // all other works end because of the link
    writes_end_.begin(context_.control);
    if (goodbye) goodbye_ = Goodbye::kOwed;
    goodbye_deadline_ = now + context_.resources.tuning.goodbye_timeout;
  }
  if (goodbye) return;
  goodbye_ = Goodbye::kNone;
  messages_end_.begin(context_.control);
}

void Link::note_last_receive(uint32_t number) noexcept {
  (number == writes_.pair()->number() ? writes_end_ : messages_end_).note_last_receive();
}

bool Link::step(Clock::time_point now, CompletionQueue& out) {
  const auto flush_timeout = context_.resources.tuning.flush_timeout;
  bool any = writes_end_.step(context_.control, context_.completions, now, flush_timeout);
  // The goodbye is sent once nothing more can land, and the transfer engine has had a turn to take the latest messages.
  if (goodbye_ == Goodbye::kOwed && closed_ && !messages_end_.begun()) any |= say_goodbye();
  if (!messages_end_.begun() &&
      ((goodbye_ == Goodbye::kSaid && messages_.idle()) || goodbye_deadline_ <= now || fault)) {
    messages_end_.begin(context_.control);
    any = true;
  }
  any |= messages_end_.step(context_.control, context_.completions, now, flush_timeout);
  if (!closed_ && writes_end_.over()) close(out);
  if (messages_end_.over()) {
    for (const Sent& sent : messages_.give_up()) {
      if (sent.buffer) context_.resources.buffers->give_back(*sent.buffer);
    }
  }
  return any;
}

bool Link::say_goodbye() {
  if (!say_owed() || !say({Control::Kind::kGoodbye, landed_})) return false;
  goodbye_ = Goodbye::kSaid;
  return true;
}

void Link::close(CompletionQueue& out) {
  closed_ = true;
  for (const Sent& sent : writes_.give_up()) {
    if (!sent.work) continue;
    if (landed_there_ && reached(*landed_there_, sent.landed_at)) {
      out.done(*sent.work);
    } else if (failure_ && failure_->request.kind == Kind::kWrite && failure_->request.sequence == sent.sequence) {
      out.failed(*sent.work, failure_->error);
    } else {
      out.failed(*sent.work, why_);
    }
  }
  if (has_rest()) out.failed(rest_->work(), why_);
  rest_.reset();
  sent_messages_.clear([&](WorkId work) { out.failed(work, why_); });
}

std::optional<Clock::time_point> Link::deadline() const noexcept {
  std::optional<Clock::time_point> earliest = writes_end_.deadline();
  const auto consider = [&](std::optional<Clock::time_point> when) {
    if (when && (!earliest || *when < *earliest)) earliest = when;
  };
  consider(messages_end_.deadline());
  if (parting()) consider(goodbye_deadline_);
  return earliest;
}

}  // namespace kvc::verbs
