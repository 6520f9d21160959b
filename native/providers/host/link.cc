#include "providers/host/link.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/process.h"
#include "lane/immediate.h"
#include "providers/host/remote_write.h"

namespace kvc::host {

using same_host::Admission;
using same_host::Sent;
using Put = same_host::ImmediateRing::Put;

// The sender's stay in the peer's gate, from constructor to destructor.
class Link::Gate {
 public:
  explicit Gate(Link& link) noexcept : link_(link) { link_.out_.gate.store(++link_.gate_, std::memory_order_seq_cst); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() {
    same_host::handing_over();
    link_.out_.gate.store(++link_.gate_, std::memory_order_release);
  }

 private:
  Link& link_;
};

Link::Link(LinkId id, const std::shared_ptr<Connection>& connection, const LinkContext& context, const Memories& ours)
    : LinkBase(kLane, id, context, connection, same_host::direction_of(connection->incoming<Segment>()),
               same_host::direction_of(connection->outgoing<Segment>()), kQueueDepth),
      ours_(ours),
      same_process_(connection->pid() == getpid()),
      in_(connection->incoming<Segment>()),
      out_(connection->outgoing<Segment>()) {}

// --- Control messages

// Sends a control message. Returns false if the socket is full, or if the peer has hung up, which service() will read.
bool Link::say(const Message& message, std::span<const int> descriptors) {
  if (connection_->send(message, descriptors) == Sent::kYes) return true;
  wait_for_room();
  return false;
}

bool Link::tell() {
  if (closed_ || socket_full_ || !has_to_tell()) return false;
  if (!forgotten_.empty()) {
    if (!say({.kind = MessageKind::kForget, .memory = forgotten_.front()}, {})) return false;
    forgotten_.pop_front();
    return true;
  }
  const auto next = ours_.by_name.upper_bound(told_);
  if (next == ours_.by_name.end()) {
    told_ = ours_.last;
    return true;
  }
  const auto& [name, memory] = *next;
  const std::array descriptors{memory->fd.get()};
  if (!say({.kind = MessageKind::kMemory, .memory = name, .bytes = memory->bytes}, descriptors)) return false;
  told_ = name;
  return true;
}

void Link::process_ended() { lose_peer(remote_write_error("link", connection_->pid(), ESRCH)); }

bool Link::handle(const Message& message, Connection::Descriptors& descriptors) {
  switch (message.kind) {
    case MessageKind::kWake:
      return true;
    case MessageKind::kWelcome:
      return connection_->meet(descriptors);
    case MessageKind::kMemory: {
      awaiting_memory_ = false;
      if (message.memory == 0 || memories_.size() >= kMaxRegions || memories_.contains(message.memory)) return false;
      Result<Mapping> memory =
          same_host::map_peer_memory(descriptors[0].get(), message.bytes, same_host::Others::kWrite);
      if (!memory) return false;
      memories_.emplace(message.memory, std::move(memory.value()));
      return true;
    }
    case MessageKind::kForget:
      awaiting_memory_ = false;  // perhaps for this memfd, whose descriptor will not arrive any more
      if (auto memory = memories_.extract(message.memory)) {
        context_.control.dispose(std::make_unique<Mapping>(std::move(memory.mapped())));
      }
      return true;
    case MessageKind::kNone:
    case MessageKind::kHello:
      break;  // valid as a first message only, which the rendezvous reads
  }
  return false;
}

// --- Sending

Posted Link::post(const WriteBatch& batch) {
  if (closed_) {
    context_.completions.failed(batch.work, peer_down("post", "the link is down"));
    return Posted::kYes;
  }
  if (queue_.full()) return Posted::kBusy;
  const bool first = queue_.empty();
  queue_.push(batch);
  if (first && batch.page_bytes * batch.pages.size() <= kInlineBytes) progress(kInlineBytes);
  return Posted::kYes;
}

Posted Link::send(WorkId work, std::span<const std::byte> message) {
  if (closed_ || out_.admitted() == Admission::kRevoked) {
    context_.completions.failed(work,
                                peer_down("send", closed_ ? "the link is down" : "the peer has fenced this link"));
    return Posted::kYes;
  }
  if (!messages_.put(work, message)) return Posted::kBusy;
  announce_soon();
  return Posted::kYes;
}

uint64_t Link::progress(uint64_t budget) {
  uint64_t spent = 0;
  bool blocked = false;
  while (!closed_ && connection_->met() && !queue_.empty() && spent < budget && !blocked) {
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
      if (step == Step::kFailed) {
        context_.completions.failed(batch.work, std::move(error));
      } else {
        context_.completions.done(batch.work);
      }
      queue_.pop();
    }
  }
  // Waking a process costs as much as writing many pages, so not every batch or turn wakes the peer. If this side waits
  // for the peer, it wakes the peer at once.
  const bool announce = queue_.empty() || blocked || unannounced_ >= kAnnounceBytes;
  if (!closed_ && connection_->met() && announce && std::exchange(wake_due_, false)) {
    unannounced_ = 0;
    // If the socket is full, it holds messages for the peer, which wakes up without this one.
    if (connection_->begin_wake()) connection_->send({.kind = MessageKind::kWake});
  }
  return spent;
}

// Announces a message at the next turn: messages do not wait for the pages behind them.
void Link::announce_soon() noexcept {
  wake_due_ = true;
  unannounced_ = kAnnounceBytes;
}

// Writes one chunk of `batch`, and its immediate after the last chunk. All of this happens inside the gate: once the
// peer has fenced this side, its ring changes no more.
Link::Step Link::advance(BatchQueue::Item& batch, uint64_t limit, Error& error) {
  const Gate gate(*this);
  switch (out_.admitted()) {
    case Admission::kPending:
      return Step::kBlocked;
    case Admission::kOpen:
      break;
    case Admission::kRevoked:
      error = peer_down("write", "the peer has fenced this link");
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

// Finds the region of `batch` on the peer's board and checks every page against it. This is repeated for each chunk,
// inside the gate: the region may be gone since the last one.
Link::Step Link::locate(const BatchQueue::Item& batch, Target& target, Error& error) {
  const RegionEntry& entry = connection_->board<Board>().regions[place_of(batch.rkey)];
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
    if (!fits(at, batch.page_bytes, length)) {
      error = kLane.error(ErrorCode::kOutOfRange, "write",
                          std::to_string(batch.page_bytes) + " bytes at " + std::to_string(at) +
                              " do not fit the peer's region of " + std::to_string(length));
      return Step::kFailed;
    }
  }
  if (memory == 0) {
    // Between two engines of one process, the peer's addresses are valid here.
    if (same_process_) target.mapped = reinterpret_cast<std::byte*>(base);
    target.address = base;
    return Step::kMoved;
  }
  const auto found = memories_.find(static_cast<uint32_t>(memory));
  if (found == memories_.end()) {
    // Its descriptor is in flight: the peer sent it before it gave the key out.
    awaiting_memory_ = true;
    return Step::kBlocked;
  }
  if (!fits(offset, length, found->second.size())) {
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
  // A pid can pass on to another process, and only the pidfd shows that. Reuse takes a round through all pids, which is
  // much longer than the time from this check to the call.
  if (is_gone(connection_->process())) {
    error = remote_write_error("write", connection_->pid(), ESRCH);
    return Step::kPeerGone;
  }
  std::array<iovec, Immediate::kMaxMultiplicity> local;
  std::array<iovec, Immediate::kMaxMultiplicity> remote;
  size_t locals = 0;
  size_t remotes = 0;
  // Pages that follow each other in memory become one piece: the kernel pins the peer's memory piece by piece.
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
  const ssize_t length = process_vm_writev(connection_->pid(), local.data(), locals, remote.data(), remotes, 0);
  if (length > 0) {
    // if fewer bytes than requested were written, the next call returns the reason
    batch.written += static_cast<uint64_t>(length);
    return Step::kMoved;
  }
  const int error_number = length < 0 ? errno : EFAULT;
  error = remote_write_error("write", connection_->pid(), error_number);
  return error_number == ESRCH ? Step::kPeerGone : Step::kFailed;
}

// Puts the immediate of written pages into the peer's ring.
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

// progress() notifies the peer in the next turn.
void Link::take(uint32_t slot) noexcept {
  messages_.take(slot);
  announce_soon();
}

bool Link::has_work() const noexcept {
  if (closed_) return false;
  if (ring_.has_arrivals() || messages_.has_work() || (has_to_tell() && !socket_full_)) return true;
  if (!connection_->met()) return false;
  if (wake_due_) return true;
  return !queue_.empty() && !awaiting_memory_ && ring_.may_have_room() && out_.admitted() != Admission::kPending;
}

// --- The end

bool Link::end() {
  if (!left_gate(gate_at_close_)) return false;
  ring_.drain();
  connection_->hang_up();
  return true;
}

bool Link::left_gate(uint64_t seen) const {
  if (seen % 2 == 0 || gate() != seen) {
    same_host::taking_over();
    return true;
  }
  // For an open link without a pidfd, service() finds the end.
  return (closed_ || connection_->process()) && connection_->peer_is_gone();
}

}  // namespace kvc::host
