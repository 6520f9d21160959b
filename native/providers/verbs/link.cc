#include "providers/verbs/link.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvc::verbs {

using Kind = WorkRequestId::Kind;

WriteChain::WriteChain() {
  for (uint32_t i = 0; i < kLength; ++i) {
    requests_[i].next = i + 1 < kLength ? &requests_[i + 1] : nullptr;
    requests_[i].sg_list = &pieces_[i];
  }
}

Link::Link(Shared& shared, LinkId id, QueuePair writes, QueuePair messages)
    : shared_(shared), id_(id), writes_(std::move(writes)), messages_(std::move(messages)) {}

// --- Connecting

Endpoint Link::endpoint(LinkId offered, const Address& address) const {
  return Endpoint{.link = offered,
                  .key_half = shared_.regions.key_half(),
                  .address = address,
                  .writes = writes_.end(),
                  .messages = messages_.end()};
}

Status Link::accept(const Path& path, const Endpoint& peer) {
  if (Status status = writes_.receive_from(path, peer.writes); !status) return status;
  if (Status status = messages_.receive_from(path, peer.messages); !status) return status;
  peer_key_half_ = peer.key_half;
  state_ = State::kAccepted;
  return {};
}

Status Link::open() {
  if (Status status = writes_.start_sending(); !status) return status;
  if (Status status = messages_.start_sending(); !status) return status;
  state_ = State::kUp;
  return {};
}

Status Link::complete(const Path& path, const Endpoint& peer) {
  if (Status status = accept(path, peer); !status) return status;
  if (Status status = open(); !status) return status;
  return say(Control{Control::Kind::kHello});
}

// --- Writing

Posted Link::post(const WriteBatch& batch, Region* source) {
  if (state_ != State::kUp || broken || has_rest()) return Posted::kBusy;
  Remainder& posting = shared_.posting;
  posting.start(batch, source, shared_.device->max_message());
  // One that can never go at once goes in parts; any other waits until there is room for all of it.
  if (writes_.room() < std::min<uint64_t>(posting.pieces(), writes_.slots() / 2)) return Posted::kBusy;
  if (source != nullptr) ++source->in_flight;
  if (Status posted = post_pieces(posting); !posted) broken = Broken{posted.error()};
  if (posting.pieces() > 0) rest_ = std::make_unique<Remainder>(posting);
  return Posted::kYes;
}

bool Link::continue_rest() {
  const uint64_t before = rest_->pieces();
  if (Status posted = post_pieces(*rest_); !posted) broken = Broken{posted.error()};
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
      sent.source = batch.region();
    }
    shared_.chain.cut(count);
    Result<uint32_t> taken = writes_.post(&shared_.chain.request(0), count, sent);
    shared_.chain.mend(count);
    if (taken.ok() && taken.value() == count) continue;
    batch.rewind(before);
    for (uint32_t i = 0; taken.ok() && i < taken.value(); ++i) batch.next();
    return taken.ok() ? Status() : taken.error();
  }
  return {};
}

void Link::fill(Remainder& batch, uint32_t count) {
  const uint64_t id = WorkRequestId{Kind::kWrite, id_, writes_.next_sequence()}.encode();
  const bool host = batch.region() != nullptr && batch.region()->host;
  for (uint32_t i = 0; i < count; ++i) {
    const Remainder::Piece piece = batch.next();
    abi::ibv_send_wr& request = shared_.chain.request(i);
    request.wr_id = id;
    request.opcode = abi::IBV_WR_RDMA_WRITE;
    request.send_flags = host && piece.bytes <= writes_.inline_bytes() ? unsigned{abi::IBV_SEND_INLINE} : 0U;
    if (batch.empty()) {
      request.num_sge = 0;
      request.wr.rdma.remote_addr = 0;
      request.wr.rdma.rkey = 0;
      continue;
    }
    request.num_sge = 1;
    shared_.chain.piece(i) = {piece.source, piece.bytes, batch.region()->mr->lkey};
    request.wr.rdma.remote_addr = piece.target;
    request.wr.rdma.rkey = batch.rkey();
  }
  abi::ibv_send_wr& last = shared_.chain.request(count - 1);
  last.send_flags |= abi::IBV_SEND_SIGNALED;
  // In order on one queue pair: when this one arrives, all pieces before it have.
  if (batch.counted() && batch.pieces() == 0) {
    last.opcode = abi::IBV_WR_RDMA_WRITE_WITH_IMM;
    last.imm_data = big_endian(batch.immediate());
  }
}

void Link::ask() {
  if (state_ != State::kUp || broken || has_rest() || !writes_.idle() || writes_.room() == 0) return;
  abi::ibv_send_wr request{};
  request.wr_id = WorkRequestId{Kind::kWrite, id_, writes_.next_sequence()}.encode();
  request.opcode = abi::IBV_WR_RDMA_WRITE;
  request.send_flags = abi::IBV_SEND_SIGNALED;
  if (Result<uint32_t> posted = writes_.post(&request, 1, Sent{}); !posted) broken = Broken{posted.error()};
}

// --- Messages

Result<uint32_t> Link::post_message(std::span<const std::byte> message, const Control& control) {
  abi::ibv_sge piece{};
  abi::ibv_send_wr request{};
  Sent sent;
  if (!message.empty()) {
    sent.buffer = shared_.buffers->take();
    if (!sent.buffer) return uint32_t{0};
    std::byte* const copy = shared_.buffers->data(*sent.buffer);
    std::memcpy(copy, message.data(), message.size());
    piece = {reinterpret_cast<uint64_t>(copy), static_cast<uint32_t>(message.size()), shared_.buffers->lkey()};
    request.sg_list = &piece;
    request.num_sge = 1;
  }
  request.wr_id = WorkRequestId{Kind::kMessage, id_, messages_.next_sequence()}.encode();
  request.opcode = abi::IBV_WR_SEND_WITH_IMM;
  request.send_flags = abi::IBV_SEND_SIGNALED;
  request.imm_data = big_endian(control.encode());
  Result<uint32_t> taken = messages_.post(&request, 1, sent);
  if (sent.buffer && (!taken || taken.value() == 0)) shared_.buffers->give_back(*sent.buffer);
  return taken;
}

Posted Link::send(WorkId work, std::span<const std::byte> message) {
  // Two slots stay free: for saying what we took, and for saying goodbye.
  if (state_ != State::kUp || broken || messages_.room() < 3) return Posted::kBusy;
  const auto slot = std::find(untaken_.begin(), untaken_.end(), std::nullopt);
  if (slot == untaken_.end()) return Posted::kBusy;
  const auto number = static_cast<uint16_t>(slot - untaken_.begin());
  Result<uint32_t> posted = post_message(message, Control{Control::Kind::kMessage, number});
  if (!posted) {
    broken = Broken{posted.error()};  // the work is completed with the link
    *slot = work;
    return Posted::kYes;
  }
  if (posted.value() == 0) return Posted::kBusy;
  *slot = work;
  return Posted::kYes;
}

void Link::taken(uint32_t slots, DomainSink& sink) {
  for (uint32_t slot = 0; slot < kMessages; ++slot) {
    if ((slots & (1U << slot)) == 0 || !untaken_[slot]) continue;
    sink.on_complete(*std::exchange(untaken_[slot], std::nullopt), nullptr);
  }
}

bool Link::say_taken() {
  if (state_ != State::kUp || broken || messages_.room() < 2) return false;
  if (!say(Control{Control::Kind::kTaken, static_cast<uint16_t>(took_)})) return false;
  took_ = 0;
  return true;
}

Status Link::say(const Control& control) {
  if (messages_.room() > 0) {
    Result<uint32_t> posted = post_message({}, control);
    if (!posted) return posted.error();
    if (posted.value() == 1) return {};
  }
  return verbs_error(ErrorCode::kResources, "connect", "the queue for messages takes nothing more");
}

// --- Ending

std::optional<Sent> Link::completed(const WorkRequestId& request) {
  return queue(request.kind).completed(request.sequence);
}

void Link::release(const Sent& sent) {
  if (sent.source != nullptr) --sent.source->in_flight;
  if (sent.buffer) shared_.buffers->give_back(*sent.buffer);
}

bool Link::broke(Kind kind, uint32_t sequence) const noexcept {
  return broken && broken->request && broken->request->kind == kind && broken->request->sequence == sequence;
}

void Link::destroy(Kind kind, const Error& error, DomainSink& sink) {
  for (const Sent& sent : queue(kind).destroy()) {
    release(sent);
    if (sent.work) sink.on_complete(*sent.work, broke(kind, sent.sequence) ? &broken->error : &error);
  }
  if (kind != Kind::kWrite || !has_rest()) return;
  const std::unique_ptr<Remainder> rest = std::move(rest_);
  if (rest->region() != nullptr) --rest->region()->in_flight;
  sink.on_complete(rest->work(), &error);
}

void Link::give_up_messages(const Error& error, DomainSink& sink) {
  for (std::optional<WorkId>& work : untaken_) {
    if (work) sink.on_complete(*std::exchange(work, std::nullopt), &error);
  }
}

}  // namespace kvc::verbs
