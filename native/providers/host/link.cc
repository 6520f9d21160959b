#include "providers/host/link.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "engine/immediate.h"
#include "providers/host/remote_write.h"

namespace kvc::host {

using same_host::Received;
using same_host::Sent;
using same_host::Taken;
using Put = same_host::ImmediateRing::Put;

namespace {

Error overwritten(std::string_view operation) {
  return kLane.error(ErrorCode::kPeerDown, operation, "the peer has overwritten the link's control words");
}

}  // namespace

// The sender's stay in the peer's gate.
class Link::Gate {
 public:
  explicit Gate(Link& link) noexcept : link_(link) { link_.out_->gate.store(++link_.gate_, std::memory_order_seq_cst); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() {
    same_host::handing_over();
    link_.out_->gate.store(++link_.gate_, std::memory_order_release);
  }
  bool revoked() const noexcept { return link_.out_->revoked.load(std::memory_order_seq_cst) != 0; }

 private:
  Link& link_;
};

// --- Set-up

Link::~Link() {
  if (in_ != nullptr) in_->revoked.store(1, std::memory_order_seq_cst);
}

Status Link::attach(same_host::PeerSocket peer, Mapping segment, Connection::Role role) {
  same_process_ = peer.pid == getpid();
  Status attached = connection_.attach(std::move(peer), std::move(segment), role);
  in_ = &connection_.incoming<Segment>();
  out_ = &connection_.outgoing<Segment>();
  ring_.attach(same_host::direction_of(*in_), same_host::direction_of(*out_));
  messages_.attach(same_host::direction_of(*in_), same_host::direction_of(*out_));
  return attached;
}

// --- Control messages

void Link::send(const Message& message, std::initializer_list<int> descriptors) {
  if (closed_) return;
  if (outbox_.empty()) {
    switch (connection_.send(message, {descriptors.begin(), descriptors.size()})) {
      case Sent::kYes:
        return;
      case Sent::kBroken:
        return;  // the peer has hung up: service() will read that
      case Sent::kLater:
        break;
    }
  }
  // A socket that takes no more has something for the peer to read: it wakes up without this.
  if (message.kind == MessageKind::kWake) return;
  Outgoing& waiting = outbox_.emplace_back();
  waiting.message = message;
  for (const int fd : descriptors) waiting.descriptors.emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  connection_.watch(EPOLLIN | EPOLLOUT);
}

// Sends what waits; false if the socket is broken.
bool Link::flush() {
  while (!outbox_.empty()) {
    const Outgoing& next = outbox_.front();
    std::array<int, same_host::kMaxDescriptors> raw{};
    for (size_t i = 0; i < next.descriptors.size(); ++i) {
      if (!next.descriptors[i]) return false;  // out of descriptors when it was queued: the peer would miss it
      raw[i] = next.descriptors[i].get();
    }
    const Sent sent = connection_.send(next.message, {raw.data(), next.descriptors.size()});
    if (sent != Sent::kYes) return sent == Sent::kLater;
    outbox_.pop_front();
    if (outbox_.empty()) connection_.watch(EPOLLIN);
  }
  return true;
}

void Link::service() {
  if (closed_ || !attached()) return;
  if (!flush()) return lose_peer(kLane.error(ErrorCode::kPeerDown, "link", "the socket to the peer broke"));
  const Received last = connection_.receive(
      [this](const Message& message, Connection::Descriptors& descriptors) { return handle(message, descriptors); });
  if (last == Received::kClosed) lose_peer(connection_.what_ended(last));
  if (last == Received::kMalformed) break_down(connection_.what_ended(last));
}

void Link::process_ended() { lose_peer(remote_write_error("link", connection_.pid(), ESRCH)); }

bool Link::handle(const Message& message, Connection::Descriptors& descriptors) {
  switch (message.kind) {
    case MessageKind::kWake:
      return true;
    case MessageKind::kWelcome:
      return connection_.meet(descriptors);
    case MessageKind::kMemory: {
      if (message.memory == 0 || memories_.size() >= kMaxRegions || memories_.contains(message.memory)) return false;
      Result<Mapping> memory =
          same_host::map_peer_memory(descriptors[0].get(), message.bytes, same_host::Others::kWrite);
      if (!memory) return false;
      memories_.emplace(message.memory, std::move(memory.value()));
      awaiting_memory_ = false;
      return true;
    }
    case MessageKind::kForget:
      memories_.erase(message.memory);
      return true;
    case MessageKind::kNone:
    case MessageKind::kHello:
      break;  // only ever the first message, and read by the domain
  }
  return false;
}

// --- Sending

void Link::complete(WorkId work, const Error& error) { sink_.on_complete(work, &error); }

Posted Link::post(const WriteBatch& batch) {
  const size_t count = batch.pages.size();
  if (closed_) {
    complete(batch.work, kLane.error(ErrorCode::kPeerDown, "post", "the link is down"));
    return Posted::kYes;
  }
  if (count == 0 || count > Immediate::kMaxMultiplicity || batch.page_bytes > UINT64_MAX / count) {
    complete(batch.work, kLane.error(ErrorCode::kInvalidArgument, "post", "a batch has 1 to 64 pages"));
    return Posted::kYes;
  }
  if (queue_.full()) return Posted::kBusy;
  const bool first = queue_.empty();
  queue_.push(batch);
  if (first && batch.page_bytes <= kInlineBytes / count) progress(kInlineBytes);
  return Posted::kYes;
}

Posted Link::post_message(WorkId work, std::span<const std::byte> message) {
  if (closed_) {
    complete(work, kLane.error(ErrorCode::kPeerDown, "send", "the link is down"));
    return Posted::kYes;
  }
  // Before the connection is there, there is no memory to put it into.
  if (!attached()) return Posted::kBusy;
  if (out_->revoked.load(std::memory_order_seq_cst) != 0) {
    complete(work, kLane.error(ErrorCode::kPeerDown, "send", "the peer has fenced this link"));
    return Posted::kYes;
  }
  if (!messages_.put(work, message)) return Posted::kBusy;
  wake_due_ = true;
  unannounced_ = kAnnounceBytes;  // messages do not wait for the pages behind them
  return Posted::kYes;
}

uint64_t Link::progress(uint64_t budget) {
  // The sink may post from within a completion: that goes on in the loop below, not deeper down the stack.
  if (progressing_) return 0;
  progressing_ = true;
  uint64_t spent = 0;
  bool blocked = false;
  while (!closed_ && connection_.met() && !queue_.empty() && spent < budget && !blocked) {
    BatchQueue::Item& batch = queue_.front();
    const uint64_t before = batch.written;
    Error error;
    const Step step = advance(batch, budget - spent, error);
    spent += batch.written - before;
    unannounced_ += batch.written - before;
    blocked = step == Step::kBlocked;
    if (blocked) continue;
    if (step == Step::kPeerGone) {
      lose_peer(error);
    } else if (step == Step::kFailed || batch.written == batch.total) {
      spent += kBatchCost;
      const WorkId work = batch.work;
      queue_.pop();  // before the sink may post again
      sink_.on_complete(work, step == Step::kFailed ? &error : nullptr);
    }
  }
  progressing_ = false;
  // Not for each batch, nor for each turn: waking a process costs as much as writing many pages. At once where we wait
  // for the peer ourselves.
  const bool announce = queue_.empty() || blocked || unannounced_ >= kAnnounceBytes;
  if (!closed_ && connection_.met() && announce && std::exchange(wake_due_, false)) {
    unannounced_ = 0;
    if (connection_.begin_wake()) send(Message{MessageKind::kWake});
  }
  return spent;
}

// Takes `batch` one step further: one chunk, and its immediate after the last one. All of it inside the gate: once the
// peer has fenced us, what it finds in its ring is all that will ever be there.
Link::Step Link::advance(BatchQueue::Item& batch, uint64_t limit, Error& error) {
  const Gate gate(*this);
  if (gate.revoked()) {
    error = kLane.error(ErrorCode::kPeerDown, "write", "the peer has fenced this link");
    return Step::kPeerGone;
  }
  if (batch.written < batch.total) {
    Target target;
    Step step = locate(batch, target, error);
    if (step != Step::kMoved) return step;
    limit = std::min({limit, kChunkBytes, batch.total - batch.written});
    step = target.mapped != nullptr ? copy_into(target.mapped, batch, limit)
                                    : write_remote(target.address, batch, limit, error);
    if (step != Step::kMoved || batch.written < batch.total) return step;
  }
  return batch.counted ? put_immediate(batch.immediate, error) : Step::kMoved;
}

// Finds the region of `batch` on the peer's board and checks every page against it. Inside the gate, each time: the
// region may be gone since the last chunk.
Link::Step Link::locate(const BatchQueue::Item& batch, Target& target, Error& error) {
  const RegionEntry& entry = connection_.board<Board>().regions[batch.rkey % kMaxRegions];
  if (batch.rkey == 0 || entry.rkey.load(std::memory_order_seq_cst) != batch.rkey) {
    error = kLane.error(ErrorCode::kUnknownRegion, "write", "the peer has no region of this key, or has revoked it");
    return Step::kFailed;
  }
  const uint64_t base = entry.base.load(std::memory_order_relaxed);
  const uint64_t length = entry.length.load(std::memory_order_relaxed);
  const uint64_t memory = entry.memory.load(std::memory_order_relaxed);
  const uint64_t offset = entry.memory_offset.load(std::memory_order_relaxed);
  for (uint32_t i = 0; i < batch.count; ++i) {
    const uint64_t at = batch.pages[i].target_offset;
    if (batch.page_bytes > length || at > length - batch.page_bytes) {
      error = kLane.error(ErrorCode::kOutOfRange, "write",
                          std::to_string(batch.page_bytes) + " bytes at " + std::to_string(at) +
                              " do not fit the peer's region of " + std::to_string(length));
      return Step::kFailed;
    }
  }
  if (memory == 0) {
    // Between two engines of one process, the peer's addresses are ours.
    if (same_process_) target.mapped = reinterpret_cast<std::byte*>(base);
    target.address = base;
    return Step::kMoved;
  }
  const auto found = memories_.find(static_cast<uint32_t>(memory));
  if (found == memories_.end()) {
    // Its descriptor is on the way, sent before the key was given out.
    awaiting_memory_ = true;
    return Step::kBlocked;
  }
  if (offset > found->second.size() || length > found->second.size() - offset) {
    error = kLane.error(ErrorCode::kOutOfRange, "write", "the peer's region is larger than the memory behind it");
    return Step::kFailed;
  }
  target.mapped = found->second.data() + offset;
  return Step::kMoved;
}

Link::Step Link::copy_into(std::byte* region, BatchQueue::Item& batch, uint64_t limit) {
  uint64_t page = batch.written / batch.page_bytes;
  uint64_t skip = batch.written % batch.page_bytes;
  for (uint64_t left = limit; left > 0; ++page, skip = 0) {
    const uint64_t bytes = std::min(batch.page_bytes - skip, left);
    std::memcpy(region + batch.pages[page].target_offset + skip, batch.pages[page].source + skip, bytes);
    left -= bytes;
  }
  batch.written += limit;
  return Step::kMoved;
}

Link::Step Link::write_remote(uint64_t region, BatchQueue::Item& batch, uint64_t limit, Error& error) {
  // A pid can pass on to a stranger, and only the pidfd knows. It takes a round through all pids: much longer than
  // from here to the call.
  if (same_host::is_gone(connection_.process())) {
    error = remote_write_error("write", connection_.pid(), ESRCH);
    return Step::kPeerGone;
  }
  std::array<iovec, Immediate::kMaxMultiplicity> local;
  std::array<iovec, Immediate::kMaxMultiplicity> remote;
  size_t locals = 0;
  size_t remotes = 0;
  // Pages that follow each other become one piece: the kernel pins the peer's memory piece by piece.
  const auto append = [](std::array<iovec, Immediate::kMaxMultiplicity>& pieces, size_t& n, uint64_t address,
                         uint64_t bytes) {
    if (n > 0 && reinterpret_cast<uint64_t>(pieces[n - 1].iov_base) + pieces[n - 1].iov_len == address) {
      pieces[n - 1].iov_len += bytes;
    } else {
      pieces[n++] = iovec{reinterpret_cast<void*>(address), bytes};
    }
  };
  uint64_t page = batch.written / batch.page_bytes;
  uint64_t skip = batch.written % batch.page_bytes;
  for (uint64_t left = limit; left > 0; ++page, skip = 0) {
    const uint64_t bytes = std::min(batch.page_bytes - skip, left);
    append(local, locals, reinterpret_cast<uint64_t>(batch.pages[page].source) + skip, bytes);
    append(remote, remotes, region + batch.pages[page].target_offset + skip, bytes);
    left -= bytes;
  }
  const ssize_t length = process_vm_writev(connection_.pid(), local.data(), locals, remote.data(), remotes, 0);
  if (length > 0) {
    batch.written += static_cast<uint64_t>(length);  // less than asked for: the next call says why
    return Step::kMoved;
  }
  const int error_number = length < 0 ? errno : EFAULT;
  error = remote_write_error("write", connection_.pid(), error_number);
  return error_number == ESRCH ? Step::kPeerGone : Step::kFailed;
}

// The pages of `immediate` are written: tells the peer.
Link::Step Link::put_immediate(uint32_t immediate, Error& error) {
  switch (ring_.put(immediate)) {
    case Put::kYes:
      wake_due_ = true;
      return Step::kMoved;
    case Put::kFull:
      return Step::kBlocked;
    case Put::kOverwritten:
      break;
  }
  error = overwritten("write");
  return Step::kPeerGone;
}

// --- Receiving

bool Link::receive() {
  bool any = receive_immediates();
  any |= receive_messages();
  any |= attached() && !closed_ && messages_.complete();
  return any;
}

bool Link::receive_immediates() {
  if (closed_ || !attached()) return false;
  const Taken taken = ring_.receive();
  if (taken == Taken::kNothing) return false;
  if (taken == Taken::kOverwritten) {
    break_down(overwritten("receive"));
  } else if (ring_.starves_peer()) {
    send(Message{MessageKind::kWake});
  }
  return true;
}

bool Link::receive_messages() {
  if (closed_ || !attached()) return false;
  const Taken taken = messages_.receive();
  if (taken == Taken::kNothing) return false;
  if (taken == Taken::kOverwritten) break_down(overwritten("receive"));
  wake_due_ = true;  // progress() follows in the same turn
  unannounced_ = kAnnounceBytes;
  return true;
}

bool Link::has_work() const noexcept {
  if (closed_ || !attached()) return false;
  if (ring_.has_arrivals() || messages_.has_work()) return true;
  return !queue_.empty() && connection_.met() && !awaiting_memory_ && ring_.may_have_room();
}

// --- The end

void Link::close(const Error& error) {
  if (closed_) return;
  closed_ = true;
  ring_.close();
  if (attached()) {
    in_->revoked.store(1, std::memory_order_seq_cst);
    gate_at_close_ = gate();
    messages_.complete();
  }
  connection_.stop();
  outbox_.clear();
  messages_.close(error);
  while (!queue_.empty()) {
    const WorkId work = queue_.front().work;
    queue_.pop();
    sink_.on_complete(work, &error);
  }
}

bool Link::fenced() {
  if (!fenced_ && closed_ && (!attached() || left_gate(gate_at_close_))) {
    fenced_ = true;
    if (attached()) ring_.drain();
    connection_.hang_up();
  }
  return fenced_;
}

uint64_t Link::gate() const noexcept { return attached() ? in_->gate.load(std::memory_order_seq_cst) : 0; }

bool Link::left_gate(uint64_t seen) const {
  if (seen % 2 == 0 || gate() != seen || fenced_) {
    same_host::taking_over();
    return true;
  }
  return connection_.peer_is_gone();
}

// What the peer has told us before its end is true: its pages are in place.
void Link::lose_peer(const Error& error) {
  receive_messages();
  break_down(error);
}

void Link::break_down(const Error& error) {
  if (closed_) return;
  close(error);
  sink_.on_link_down(id_, error, fenced());
}

}  // namespace kvc::host
