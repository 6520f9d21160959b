#include "providers/libfabric/link.h"

#include <rdma/fi_errno.h>

#include <algorithm>
#include <string>
#include <utility>

namespace kvc::libfabric {
namespace {

// The most batches on one link without a completion. The transfer engine keeps 8 MiB in flight, which are 8 of its
// largest batches and 32 full ones of 4 KiB pages.
constexpr size_t kMaxBatches = 128;
// Immediates after which their count is reported to the peer: four times in a window, so that a sender does not stop.
constexpr uint64_t kReportEvery = Endpoint::kImmediateWindow / 4;
// Reads of the completion queue in one poll(): 4 x 64 entries of 0.1 us each, and the copies that a provider without
// threads makes in them.
constexpr int kReadsPerPoll = 4;
// Failures come one at a time. A closed endpoint has one for each receive.
constexpr int kFailuresPerPoll = 64;
// Looks without an event after which a link is idle. Looks at an active link are some microseconds apart. So this is
// longer than a peer needs for the next batch of a transfer.
constexpr uint32_t kQuietPolls = 256;

}  // namespace

Link::Link(LinkContext& context, LinkId id, std::shared_ptr<Endpoint> endpoint)
    : context_(context),
      id_(id),
      endpoint_(std::move(endpoint)),
      messages_(*endpoint_),
      memories_(endpoint_, context.control),
      keys_(*context.device, context.regions, memories_, messages_),
      liveness_(context.tuning),
      up_(endpoint_->is_offerer()),
      writes_(endpoint_->writes()) {
  for (Write& write : writes_) free_writes_.push_back(&write);
  // The acceptor waits for this message: on EFA it must not write before its address is known here.
  if (up_) messages_.enqueue(MessageKind::kHello);
}

// --- Posting

Posted Link::post(const WriteBatch& batch) {
  if (!is_open()) {
    context_.completions.failed(batch.work, ended());
    return Posted::kYes;
  }
  if (free_batches_.empty()) {
    if (batches_.size() >= kMaxBatches) return Posted::kBusy;
    free_batches_.push_back(&batches_.emplace_back());
  }
  Batch& queued = *free_batches_.back();
  free_batches_.pop_back();
  queued.posted = batch;
  queued.posted.pages = {};
  queued.active = true;
  queued.target = nullptr;
  queued.runs_count = queued.next_run = queued.in_flight = 0;
  queued.error.reset();
  for_each_run(batch, context_.device->max_write(),
               [&queued](const PageRun& run) { queued.runs[queued.runs_count++] = run; });
  queue_.push_back(&queued);
  push_writes();
  return Posted::kYes;
}

Posted Link::send(WorkId work, std::span<const std::byte> message) {
  if (!is_open()) {
    context_.completions.failed(work, ended());
    return Posted::kYes;
  }
  const Posted posted = messages_.send(work, message);
  push_messages();
  return posted;
}

void Link::take(uint32_t slot) {
  messages_.take(slot);
  push_messages();
}

bool Link::push_writes() {
  bool any = false;
  if (!up_ || !is_open()) return any;
  while (!queue_.empty()) {
    Batch& batch = *queue_.front();
    if (!resolve(batch)) return any;
    while (!batch.error && batch.next_run < batch.runs_count) {
      const ssize_t result = write(batch, batch.runs[batch.next_run]);
      if (result == -FI_EAGAIN) return any;
      if (result != 0) {
        if (!batch.error) break_with(fabric_error("write", "fi_writemsg", result));
        if (broken_) return true;
        break;
      }
      ++batch.next_run;
      ++batch.in_flight;
      any = true;
    }
    any = true;
    queue_.pop_front();
    batch.next_run = batch.runs_count;
    if (batch.in_flight == 0) end_batch(batch);
  }
  return any;
}

bool Link::resolve(Batch& batch) {
  if (batch.error || batch.target != nullptr || !batch.has_pages()) return true;
  Keys::Target& target = keys_.target(batch.posted.rkey);
  if (target.state == Keys::Target::State::kAsked) return false;
  if (target.state == Keys::Target::State::kRevoked) {
    batch.error = fabric_error(ErrorCode::kUnknownRegion, "write", "the peer has revoked this key");
    return true;
  }
  for (uint32_t i = 0; i < batch.runs_count; ++i) {
    if (target.memory.contains(batch.runs[i].target_offset, batch.runs[i].pages * batch.posted.page_bytes)) continue;
    batch.error =
        fabric_error(ErrorCode::kOutOfRange, "write",
                     "offset " + std::to_string(batch.runs[i].target_offset) + " lies outside the peer's region of " +
                         std::to_string(target.memory.bytes) + " bytes");
    return true;
  }
  batch.target = &target;
  return true;
}

ssize_t Link::write(Batch& batch, const PageRun& run) {
  const WriteBatch& posted = batch.posted;
  if (free_writes_.empty()) return -FI_EAGAIN;
  if (posted.counted && immediates_posted_ - immediates_seen_by_peer_ >= Endpoint::kImmediateWindow) return -FI_EAGAIN;
  Write& write = *free_writes_.back();
  std::optional<uint32_t> immediate;
  if (posted.counted) immediate = Immediate::with_multiplicity(posted.immediate, run.pages);
  ssize_t result = 0;
  if (batch.target == nullptr) {
    result = endpoint_->ring(write, *immediate);
  } else {
    const Result<fid_mr*> memory = memories_.of(static_cast<const Region&>(*posted.source));
    if (!memory) batch.error = memory.error();
    if (!memory || memory.value() == nullptr) return memory ? -FI_EAGAIN : -FI_EINVAL;
    result = endpoint_->write(write, run.source, run.pages * posted.page_bytes, memory.value(), batch.target->memory,
                              run.target_offset, immediate);
  }
  if (result != 0) return result;
  free_writes_.pop_back();
  write.batch = &batch;
  if (batch.target != nullptr) ++batch.target->writes;
  if (posted.counted) ++immediates_posted_;
  return 0;
}

void Link::fail_queued(uint64_t rkey) {
  for (Batch* batch : queue_) {
    if (batch->posted.rkey != rkey || !batch->has_pages() || batch->error) continue;
    batch->error =
        fabric_error(ErrorCode::kUnknownRegion, "write", "the peer knows no region with this key, or has revoked it");
  }
}

void Link::end_batch(Batch& batch) {
  batch.active = false;
  free_batches_.push_back(&batch);
  if (batch.error) return context_.completions.failed(batch.posted.work, std::move(*batch.error));
  context_.completions.done(batch.posted.work);
}

// --- Polling

bool Link::poll() {
  if (!is_open()) return false;
  bool any = read_completions();
  any |= push_messages();
  any |= push_writes();
  any |= push_messages();  // includes the requests of push_writes()
  quiet_polls_ = any ? 0 : std::min(quiet_polls_ + 1, kQuietPolls);
  return any;
}

bool Link::active() const noexcept {
  return quiet_polls_ < kQuietPolls || !queue_.empty() || writes_under_way() || !messages_.idle() || keys_.waits();
}

bool Link::waits_for_room() const noexcept {
  if (state_ == State::kLeaving) return true;
  return is_open() && up_ && (!queue_.empty() || messages_.waits() || keys_.waits());
}

bool Link::read_completions() {
  bool any = false;
  std::array<fi_cq_data_entry, 64> entries;
  for (int reads = 0, failures = 0; reads < kReadsPerPoll && failures < kFailuresPerPoll;) {
    const ssize_t got = endpoint_->read(entries);
    if (got == -FI_EAGAIN || got == 0) break;
    ++(got == -FI_EAVAIL ? failures : reads);
    if (got == -FI_EAVAIL) {
      if (!handle_failure()) break;
    } else if (got < 0) {
      break_with(fabric_error("poll", "fi_cq_read", got));
      break;
    }
    any = true;
    for (ssize_t i = 0; i < got; ++i) handle(entries[static_cast<size_t>(i)]);
  }
  return any;
}

void Link::handle(const fi_cq_data_entry& entry) {
  auto* const operation = static_cast<Operation*>(entry.op_context);
  // A write's own completion may carry the flag as well.
  if ((entry.flags & FI_REMOTE_CQ_DATA) != 0 && (entry.flags & (FI_WRITE | FI_SEND)) == 0) {
    if (operation != nullptr && context_.device->immediates_take_receives()) {
      repost(*static_cast<MessageBuffer*>(operation));
    }
    return count(static_cast<uint32_t>(entry.data));
  }
  if (operation == nullptr) return;
  switch (operation->kind) {
    case Operation::Kind::kWrite:
      liveness_.heard();
      return finish(*static_cast<Write*>(operation), nullptr);
    case Operation::Kind::kSend:
      return messages_.sent(*static_cast<MessageBuffer*>(operation));
    case Operation::Kind::kReceive:
      return receive(*static_cast<MessageBuffer*>(operation), entry.len);
  }
}

bool Link::handle_failure() {
  const std::optional<Endpoint::Failure> failure = endpoint_->failure();
  if (!failure) return false;
  const char* what = "receive";
  Operation* const operation = failure->operation;
  if (operation != nullptr && operation->kind == Operation::Kind::kWrite) what = "write";
  if (operation != nullptr && operation->kind == Operation::Kind::kSend) what = "send";
  const Error error =
      endpoint_->closed() ? ended() : link_error(what, context_.device->provider() + ": " + failure->words);
  break_with(error);
  if (operation == nullptr) return true;
  if (operation->kind == Operation::Kind::kWrite) finish(*static_cast<Write*>(operation), &error);
  if (operation->kind == Operation::Kind::kSend) messages_.sent(*static_cast<MessageBuffer*>(operation));
  return true;
}

void Link::finish(Write& write, const Error* error) {
  free_writes_.push_back(&write);
  Batch& batch = *write.batch;
  if (batch.target != nullptr) keys_.written(batch.posted.rkey, *batch.target);
  if (error != nullptr && !batch.error) batch.error = *error;
  if (--batch.in_flight == 0 && batch.next_run == batch.runs_count) end_batch(batch);
}

void Link::count(uint32_t immediate) {
  liveness_.heard();
  if (++immediates_seen_ - immediates_reported_ >= kReportEvery) {
    immediates_reported_ = immediates_seen_;
    messages_.enqueue(MessageKind::kSeen, encode_number(immediates_seen_));
  }
  context_.completions.immediate(id_, immediate);
}

// --- Messages

bool Link::push_messages() {
  // The acceptor sends only after the offerer has sent. The exception is Bye, which an offerer that completes late
  // finds.
  if (state_ == State::kOpen ? broken_ || !up_ : state_ == State::kClosing) return false;
  const Result<bool> told = keys_.push();
  const Result<bool> sent = told ? messages_.push() : told.error();
  if (!sent) break_with(sent.error());
  return !sent || told.value() || sent.value();
}

void Link::receive(MessageBuffer& buffer, size_t length) {
  const Result<std::optional<Messages::Received>> message = messages_.read(buffer, length);
  if (!message) {
    break_with(message.error());
  } else if (message.value()) {
    liveness_.heard();
    up_ = true;
    if (Status obeyed = obey(*message.value()); !obeyed) break_with(obeyed.error());
  }
  repost(buffer);
}

void Link::repost(MessageBuffer& buffer) {
  if (state_ == State::kClosing) return;
  if (const ssize_t result = endpoint_->receive(buffer); result != 0) {
    break_with(fabric_error("receive", "fi_recv", result));
  }
}

Status Link::obey(const Messages::Received& message) {
  switch (message.kind) {
    case MessageKind::kHello:
    case MessageKind::kPong:
      return {};
    case MessageKind::kPing:
      messages_.enqueue(MessageKind::kPong);
      return {};
    case MessageKind::kBye:
      bye_received_ = true;
      return link_error("write", "the peer ended the link");
    case MessageKind::kAsk:
      return keys_.answer(message.body);
    case MessageKind::kTell:
    case MessageKind::kRevoke: {
      const Result<std::optional<uint64_t>> lost =
          message.kind == MessageKind::kTell ? keys_.learn(message.body) : keys_.lose(message.body);
      if (!lost) return lost.error();
      if (lost.value()) fail_queued(*lost.value());
      return {};
    }
    case MessageKind::kRevoked:
      return keys_.let_go(message.body);
    case MessageKind::kUser: {
      const Result<Messages::UserMessage> arrived = messages_.arrived(message.body);
      if (!arrived) return arrived.error();
      context_.completions.message(id_, arrived.value().slot, arrived.value().bytes);
      return {};
    }
    case MessageKind::kTaken: {
      const Result<WorkId> taken = messages_.taken(message.body);
      if (!taken) return taken.error();
      context_.completions.done(taken.value());
      return {};
    }
    case MessageKind::kSeen: {
      const auto seen = decode_number<uint64_t>(message.body);
      if (!seen || *seen > immediates_posted_) return nonsense();
      // Messages arrive in any order, and an older one contains a smaller number.
      immediates_seen_by_peer_ = std::max(immediates_seen_by_peer_, *seen);
      return {};
    }
  }
  return nonsense();
}

// --- The end

void Link::look_after(Clock::time_point now, Clock::duration gap) {
  if (!is_open()) return;
  switch (liveness_.look(now, gap, up_)) {
    case Liveness::Silence::kNone:
      return;
    case Liveness::Silence::kLong:
      return messages_.enqueue(MessageKind::kPing);
    case Liveness::Silence::kTooLong:
      if (!up_) return break_with(link_error("connect", "the peer did not complete the connection"));
      return break_with(link_error(
          "write", "the peer has been silent for " + std::to_string(context_.tuning.silence.count()) + " ms"));
  }
}

void Link::lose_peer() {
  // The peer's last messages are handled first.
  if (is_open() && !read_completions()) break_with(link_error("write", "the peer's process is gone"));
}

void Link::break_with(Error error) {
  if (broken_) return;
  // Which call notices that the peer is gone depends on the provider and the moment ("sockets" reports "No such file or
  // directory" in fi_writemsg() or fi_sendmsg()). The works on the link all fail with one code.
  error.code = ErrorCode::kPeerDown;
  if (state_ == State::kOpen) context_.completions.link_down(id_, error);
  broken_ = std::move(error);
}

Error Link::ended() const { return broken_ ? *broken_ : link_error("fence", "the link was fenced on this side"); }

bool Link::fence() {
  switch (state_) {
    case State::kOpen:
      state_ = State::kLeaving;
      leaving_until_ = Clock::now() + context_.tuning.bye;
      stop_posting();
      [[fallthrough]];
    case State::kLeaving:
      read_completions();
      push_messages();
      if (!has_parted()) return false;
      state_ = State::kClosing;
      context_.control.run(memories_.end());
      return false;
    case State::kClosing:
      if (!endpoint_->closed()) {
        if (endpoint_->take_busy()) context_.control.run([endpoint = endpoint_] { endpoint->close(); });
        return false;
      }
      if (read_completions()) return false;
      end_posted();
  }
  return true;
}

void Link::stop_posting() {
  messages_.stop_sending();
  for (Batch* batch : queue_) {
    batch->next_run = batch->runs_count;
    if (!batch->error) batch->error = ended();
    if (batch->in_flight == 0) end_batch(*batch);
  }
  queue_.clear();
}

// Whether both sides have what they wait for, or will not get it.
bool Link::has_parted() {
  const bool is_late = (broken_ && !bye_received_) || Clock::now() >= leaving_until_;
  if (!is_late && writes_under_way()) return false;
  if (bye_received_) return true;  // whether the peer still receives is unknown
  if (!is_late && !messages_.idle()) return false;
  if (std::exchange(bye_said_, true)) return true;
  // Bye is sent last, when the peer has everything else, because messages arrive in any order.
  messages_.enqueue(MessageKind::kBye);
  push_messages();
  return is_late;
}

void Link::end_posted() {
  for (Batch& batch : batches_) {
    if (!batch.active) continue;
    if (!batch.error) batch.error = ended();
    end_batch(batch);
  }
  messages_.clear([this](WorkId work) { context_.completions.failed(work, ended()); });
  keys_.clear();
}

void Link::close() { memories_.end()(); }

}  // namespace kvc::libfabric
