#include "providers/tcp/connection.h"

#include <limits.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "providers/tcp/link.h"

namespace kvc::tcp {
namespace {

// The number of buffers that one system call may gather or scatter (UIO_MAXIOV).
constexpr size_t kMaxIovecs = 1024;

// A frame's cost in a turn's budget, beside its bytes. Parsing the frame and counting its immediate takes as long as
// landing 1 KiB (0.15 us, measured on a flood of immediates alone).
constexpr uint64_t kFrameCost = 1 << 10;

// Collects up to `room` bytes for one sendmsg or recvmsg.
class IoList {
 public:
  explicit IoList(uint64_t room) : room_(room) {}
  void add(const void* data, uint64_t bytes) {
    const uint64_t taken = std::min(bytes, room_);
    if (taken == 0 || count_ == kMaxIovecs) return;
    // Pages that follow each other in memory are one buffer for the kernel.
    if (count_ > 0 && static_cast<std::byte*>(entries_[count_ - 1].iov_base) + entries_[count_ - 1].iov_len == data) {
      entries_[count_ - 1].iov_len += static_cast<size_t>(taken);
    } else {
      entries_[count_++] = {const_cast<void*>(data), static_cast<size_t>(taken)};
    }
    room_ -= taken;
    bytes_ += taken;
  }
  bool full() const { return room_ == 0 || count_ == kMaxIovecs; }
  uint64_t bytes() const { return bytes_; }
  msghdr message() {
    msghdr header{};
    header.msg_iov = entries_;
    header.msg_iovlen = count_;
    return header;
  }

 private:
  uint64_t room_;
  uint64_t bytes_ = 0;
  size_t count_ = 0;
  iovec entries_[kMaxIovecs];  // NOLINT: written before it is read, and too large to clear in each call
};

bool would_block(int error_number) { return error_number == EAGAIN || error_number == EWOULDBLOCK; }

Error down(std::string_view operation, std::string message) {
  return tcp_error(ErrorCode::kPeerDown, operation, std::move(message));
}

Error down(std::string_view operation, int error_number) {
  Error error = system_error("tcp", operation, error_number);
  error.code = ErrorCode::kPeerDown;
  return error;
}

}  // namespace

// --- Opening and ending.

Status Connection::dial(Dialled dialled) {
  socket_ = std::move(dialled.socket);
  hello_ = dialled.hello;
  welcome_ = dialled.welcome;
  state_ = State::kConnecting;
  return context_.epoll.add(socket_.get(), EPOLLOUT, *this);
}

Status Connection::finish_connecting() {
  if (const int error_number = take_error(socket_); error_number != 0) return down("connect", error_number);
  // The first bytes of a new connection always fit its send buffer.
  if (::send(socket_.get(), &hello_, sizeof(hello_), MSG_DONTWAIT | MSG_NOSIGNAL) != sizeof(hello_)) {
    return down("connect", errno);
  }
  state_ = State::kGreeting;
  return watch(false);
}

Status Connection::adopt(UniqueFd socket) {
  socket_ = std::move(socket);
  state_ = State::kUp;
  want_turn();
  return context_.epoll.add(socket_.get(), EPOLLIN, *this);
}

void Connection::part_with(std::unique_ptr<OutgoingFrame> last_words) {
  if (state_ != State::kUp || std::exchange(parted_, true)) return;
  // Frames that have not begun to leave are dropped.
  // Refusals stay: a peer that receives the acknowledgement of later batches must know that an earlier one was refused.
  const auto waits = [&] { return !unsent_.empty() && unsent_.back()->sent == 0 && unsent_.back()->refused == 0; };
  for (; waits(); unsent_.pop_back()) drop_frame(std::move(unsent_.back()));
  if (last_words == nullptr && owes_acknowledgement()) last_words = take_frame(FrameHeader{});
  if (last_words != nullptr) {
    // The last words go behind the rest of a frame that has begun to leave, whose pages this side may still read. This
    // sends at most as many bytes as one poll() may move: a full batch.
    unsent_.push_back(std::move(last_words));
    bool room = true;
    for (int i = 0; i < context_.tuning.turns && room && !unsent_.empty(); ++i) {
      const Result<bool> sent = transmit();
      room = sent && sent.value();
    }
  }
  // shutdown() ends the direction even if a forked child holds the same descriptor.
  ::shutdown(socket_.get(), SHUT_WR);
  (void)watch(false);
}

void Connection::end() {
  if (state_ == State::kEnded) return;
  part();
  const bool was_up = std::exchange(state_, State::kEnded) == State::kUp;
  if (std::exchange(in_sendable_, false)) std::erase(context_.sendable, this);
  if (socket_) context_.epoll.remove(socket_.get());
  if (was_up) {
    // Closing a socket into which the peer still writes would discard the last words. So the socket lingers.
    context_.control.run([lingering = context_.lingering, socket = std::make_shared<UniqueFd>(std::move(socket_))] {
      lingering->add(std::move(*socket));
    });
  } else if (socket_) {
    hang_up(socket_);
  }
  if (landing_.region != nullptr) --landing_.region->landing;
  landing_.region = nullptr;
  for (auto& frame : std::exchange(unsent_, {})) drop_frame(std::move(frame));
}

void Connection::complete_all(const Error& error) {
  const auto posted = std::exchange(unacknowledged_, {});
  queued_bytes_ = 0;
  uint64_t sequence = acknowledged_;
  for (const Unacknowledged& batch : posted) {
    ++sequence;
    const bool refused = !refused_.empty() && refused_.front().sequence == sequence;
    context_.completions.failed(batch.work, refused ? refused_.front().error : error);
    if (refused) refused_.pop_front();
  }
}

Status Connection::on_events(uint32_t events) {
  if (state_ == State::kEnded) return {};  // ended since the event was fetched
  Status status;
  if (state_ == State::kConnecting) {
    status = finish_connecting();
  } else if ((events & ~static_cast<uint32_t>(EPOLLOUT)) != 0) {
    status = read_turn();
  }
  if (!status) {
    end();
  } else if ((events & EPOLLOUT) != 0) {
    status = send_turn();
  }
  return status;
}

Status Connection::watch(bool writable) {
  watching_writable_ = writable;
  return context_.epoll.modify(socket_.get(), writable ? EPOLLIN | EPOLLOUT : EPOLLIN, *this);
}

void Connection::want_turn() {
  if (state_ != State::kUp || parted_ || watching_writable_ || in_sendable_) return;
  context_.sendable.push_back(this);
  in_sendable_ = true;
}

// --- Sending.

// Returns a frame that is its header alone.
std::unique_ptr<OutgoingFrame> Connection::take_frame(const FrameHeader& header) {
  std::unique_ptr<OutgoingFrame> frame;
  if (context_.spare_frames.empty()) {
    frame = std::make_unique<OutgoingFrame>();
  } else {
    frame = std::move(context_.spare_frames.back());
    context_.spare_frames.pop_back();
  }
  std::memcpy(frame->head.data(), &header, sizeof(header));
  frame->type = header.type;
  frame->head_bytes = sizeof(header);
  frame->pages = 0;
  frame->page_bytes = 0;
  frame->refused = 0;
  frame->sent = 0;
  return frame;
}

void Connection::drop_frame(std::unique_ptr<OutgoingFrame> frame) { context_.spare_frames.push_back(std::move(frame)); }

bool Connection::post(const WriteBatch& batch) {
  if (queued_bytes_ >= context_.tuning.queue_bytes || unacknowledged_.size() >= context_.tuning.queue_batches)
    return false;
  FrameHeader header;
  header.type = FrameType::kWrite;
  header.counted = batch.counted ? 1 : 0;
  header.count = static_cast<uint16_t>(batch.pages.size());
  header.sequence = ++posted_;
  header.rkey = batch.rkey;
  header.page_bytes = batch.page_bytes;
  header.value = batch.immediate;

  auto frame = take_frame(header);
  if (batch.page_bytes > 0) {
    std::byte* offset = frame->head.data() + sizeof(header);
    for (size_t i = 0; i < batch.pages.size(); ++i, offset += sizeof(uint64_t)) {
      std::memcpy(offset, &batch.pages[i].target_offset, sizeof(uint64_t));
      frame->sources[i] = batch.pages[i].source;
    }
    frame->head_bytes = static_cast<uint32_t>(head_bytes(header));
    frame->pages = header.count;
    frame->page_bytes = header.page_bytes;
  }
  unsent_.push_back(std::move(frame));

  const uint64_t bytes = header.count * header.page_bytes;
  unacknowledged_.push_back({batch.work, bytes});
  queued_bytes_ += bytes;
  want_turn();
  return true;
}

void Connection::send(uint32_t slot, std::span<const std::byte> message) {
  FrameHeader header;
  header.type = FrameType::kMessage;
  header.count = static_cast<uint16_t>(message.size());
  header.value = slot;
  auto frame = take_frame(header);
  frame->slot = slot;
  frame->message.assign(message.begin(), message.end());
  frame->sources[0] = frame->message.data();
  frame->pages = 1;
  frame->page_bytes = message.size();
  // A message goes ahead of the writes, which may be megabytes. It goes neither into a frame that has begun to leave,
  // nor ahead of refusals.
  auto place = unsent_.begin();
  while (place != unsent_.end() &&
         ((*place)->sent > 0 || (*place)->refused > 0 || (*place)->type == FrameType::kMessage)) {
    ++place;
  }
  unsent_.insert(place, std::move(frame));
  want_turn();
}

Status Connection::send_turn() {
  in_sendable_ = false;
  if (state_ != State::kUp || parted_) return {};
  // Any frame whose header has not left acknowledges as well as an ack would.
  if (owes_acknowledgement() && (unsent_.empty() || unsent_.back()->sent > 0)) {
    unsent_.push_back(take_frame(FrameHeader{}));
  }
  if (!unsent_.empty()) {
    const Result<bool> sent = transmit();
    if (!sent) return sent.error();
    // The socket is full. epoll reports when it is writable again.
    if (!sent.value() && !watching_writable_) return watch(true);
  }
  if (unsent_.empty() && watching_writable_) return watch(false);
  if (!unsent_.empty()) want_turn();
  return {};
}

Result<bool> Connection::transmit() {
  IoList list(context_.tuning.turn_bytes);
  for (size_t i = 0; i < unsent_.size() && !list.full(); ++i) {
    const std::unique_ptr<OutgoingFrame>& frame = unsent_[i];
    if (frame->sent == 0) {
      // A frame must not acknowledge a batch whose refusal leaves later. So refusals leave first, in the order of their
      // sequences.
      const uint64_t next_refused = i + 1 < unsent_.size() ? unsent_[i + 1]->refused : 0;
      const uint64_t acknowledged = next_refused > 0 ? next_refused - 1 : received_;
      std::memcpy(frame->head.data() + offsetof(FrameHeader, acknowledged), &acknowledged, sizeof(acknowledged));
      std::memcpy(frame->head.data() + offsetof(FrameHeader, messages_taken), &messages_taken_,
                  sizeof(messages_taken_));
    }
    if (frame->sent < frame->head_bytes) list.add(frame->head.data() + frame->sent, frame->head_bytes - frame->sent);
    const uint64_t body = frame->sent > frame->head_bytes ? frame->sent - frame->head_bytes : 0;
    if (frame->pages == 0) continue;
    uint64_t offset = body % frame->page_bytes;
    for (uint64_t page = body / frame->page_bytes; page < frame->pages && !list.full(); ++page, offset = 0) {
      list.add(frame->sources[page] + offset, frame->page_bytes - offset);
    }
  }
  const msghdr message = list.message();
  const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0 && !would_block(errno) && errno != EINTR) return down("write", errno);
  retire_sent(sent > 0 ? static_cast<uint64_t>(sent) : 0);
  return sent == static_cast<ssize_t>(list.bytes());
}

void Connection::retire_sent(uint64_t bytes) {
  while (bytes > 0) {
    OutgoingFrame& frame = *unsent_.front();
    if (frame.sent == 0) {
      told_ = received_;
      messages_told_ = messages_taken_;
      untold_bytes_ = 0;
    }
    const uint64_t taken = std::min(bytes, frame.total_bytes() - frame.sent);
    frame.sent += taken;
    bytes -= taken;
    if (frame.sent < frame.total_bytes()) return;
    if (frame.type == FrameType::kWrite) ++sent_;
    if (frame.type == FrameType::kMessage) messages_sent_ |= 1U << frame.slot;
    drop_frame(std::move(unsent_.front()));
    unsent_.pop_front();
  }
}

// --- Receiving.

Status Connection::read_turn() {
  uint64_t budget = context_.tuning.turn_bytes;
  bool drained = false;
  while (budget > 0 && !drained) {
    IoList list(budget);
    for (uint32_t page = landing_.page; landing_.region != nullptr && page < landing_.pages && !list.full(); ++page) {
      const uint64_t offset = page == landing_.page ? landing_.offset : 0;
      list.add(landing_.targets[page] + offset, landing_.page_bytes - offset);
    }
    const uint64_t landing_bytes = list.bytes();
    if (landing_.region == nullptr || !list.full()) {
      std::memmove(inbox_.data(), inbox_.data() + inbox_begin_, inbox_bytes());
      inbox_end_ = inbox_bytes();
      inbox_begin_ = 0;
      list.add(inbox_.data() + inbox_end_, inbox_.size() - inbox_end_);
    }
    msghdr message = list.message();
    const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && would_block(errno)) {
      drained = true;
      break;
    }
    if (got < 0) return down("receive", errno);
    if (got == 0) {
      return down("receive", state_ == State::kGreeting ? "the peer sent no welcome: its offer is no longer valid"
                                                        : "the peer closed the connection");
    }
    const auto bytes = static_cast<uint64_t>(got);
    drained = bytes < list.bytes();
    budget -= bytes;
    const uint64_t landed = std::min(bytes, landing_bytes);
    inbox_end_ += bytes - landed;
    if (landed > 0) advance_landing(landed);
    if (Status parsed = parse_inbox(budget); !parsed) return parsed;
  }
  // If more is waiting to be read, one acknowledgement for all of it is enough.
  if (owes_acknowledgement() &&
      (drained || untold_bytes_ >= context_.tuning.unacknowledged_bytes || !more_waits(socket_))) {
    want_turn();
  }
  return {};
}

Status Connection::parse_inbox(uint64_t& budget) {
  if (state_ == State::kGreeting) {
    bool taken = false;
    if (Status welcome = take_welcome(taken); !welcome || !taken) return welcome;
  }
  while (landing_.region == nullptr && skip_from_inbox() && inbox_bytes() >= sizeof(FrameHeader)) {
    budget -= std::min(budget, kFrameCost);
    FrameHeader header;
    const std::byte* const head = inbox_.data() + inbox_begin_;
    std::memcpy(&header, head, sizeof(header));
    if (auto why = malformed(header)) return refuse(header.sequence, ErrorCode::kInvalidArgument, *std::move(why));
    const size_t size = head_bytes(header);
    const std::byte* const body = head + sizeof(header);
    Status refusal;
    if (header.type == FrameType::kRefusal) {  // before the acknowledgement, which may cover the same batch
      if (inbox_bytes() < size) return {};
      refusal = take_refusal(header, {reinterpret_cast<const char*>(body), header.count});
    }
    if (Status taken = take_acknowledgement(header); !taken) return taken;
    if (!refusal) return refusal;
    if (inbox_bytes() < size) return {};
    inbox_begin_ += size;
    if (header.type == FrameType::kMessage) {
      if (Status taken = take_message(header.value, {body, header.count}); !taken) return taken;
    } else if (header.type == FrameType::kWrite) {
      if (Status begun = begin_landing(header, body); !begun) return begun;
      if (landing_.region != nullptr) land_from_inbox();
    }
  }
  return {};
}

Status Connection::take_welcome(bool& taken) {
  Welcome welcome;
  if (inbox_bytes() < sizeof(welcome)) return {};
  std::memcpy(&welcome, inbox_.data() + inbox_begin_, sizeof(welcome));
  inbox_begin_ += sizeof(welcome);
  if (welcome.magic != Welcome::kMagic || welcome.version != kVersion || welcome.index != index_ ||
      !welcome.secret.equals(welcome_.secret)) {
    return down("connect", "another process listens at the peer's address");
  }
  taken = true;
  state_ = State::kUp;
  want_turn();
  return {};
}

Status Connection::begin_landing(const FrameHeader& header, const std::byte* offsets) {
  if (header.sequence != received_ + 1) {
    return refuse(header.sequence, ErrorCode::kInvalidArgument, "a write with an unexpected sequence number");
  }
  if (header.page_bytes == 0) {  // an immediate alone
    ++received_;
    if (header.counted != 0) context_.completions.immediate(link_.id(), header.value);
    return {};
  }
  Registration* const region = context_.regions.find(header.rkey);
  if (region == nullptr) {
    return skip(header, ErrorCode::kUnknownRegion, "no memory region has this key, or it was revoked");
  }
  for (uint32_t page = 0; page < header.count; ++page) {
    uint64_t offset = 0;
    std::memcpy(&offset, offsets + page * sizeof(offset), sizeof(offset));
    if (!region->contains(offset, header.page_bytes)) {
      return refuse(header.sequence, ErrorCode::kOutOfRange,
                    std::to_string(header.page_bytes) + " bytes at offset " + std::to_string(offset) +
                        " are outside the region of " + std::to_string(region->bytes) + " bytes");
    }
    landing_.targets[page] = region->base + offset;
  }
  landing_.region = region;
  landing_.pages = header.count;
  landing_.page_bytes = header.page_bytes;
  landing_.page = 0;
  landing_.offset = 0;
  landing_.counted = header.counted != 0;
  landing_.immediate = header.value;
  ++region->landing;
  return {};
}

Status Connection::skip(const FrameHeader& header, ErrorCode code, const std::string& why) {
  skipping_ = header.count * header.page_bytes;
  if (parted_) return {};  // no more frames are sent
  // The refusal leaves before any frame that acknowledges this batch, and behind the refusals of earlier batches.
  auto place = unsent_.begin();
  while (place != unsent_.end() && ((*place)->sent > 0 || (*place)->refused > 0)) ++place;
  // A well-behaved peer has no more unacknowledged batches than this. This peer writes and does not read.
  if (static_cast<size_t>(place - unsent_.begin()) > context_.tuning.queue_batches) {
    return refuse(header.sequence, code, why);
  }
  auto frame = take_refusal_frame(header.sequence, code, why);
  frame->refused = header.sequence;
  unsent_.insert(place, std::move(frame));
  want_turn();
  return {};
}

bool Connection::skip_from_inbox() {
  if (skipping_ == 0) return true;
  const uint64_t dropped = std::min<uint64_t>(skipping_, inbox_bytes());
  inbox_begin_ += dropped;
  skipping_ -= dropped;
  if (skipping_ == 0) ++received_;
  return skipping_ == 0;
}

void Connection::land_from_inbox() {
  uint64_t copied = 0;
  for (uint32_t page = 0; page < landing_.pages && inbox_bytes() > 0; ++page) {
    const size_t part = std::min<uint64_t>(landing_.page_bytes, inbox_bytes());
    std::memcpy(landing_.targets[page], inbox_.data() + inbox_begin_, part);
    inbox_begin_ += part;
    copied += part;
  }
  advance_landing(copied);
}

void Connection::advance_landing(uint64_t bytes) {
  const uint64_t position = landing_.page * landing_.page_bytes + landing_.offset + bytes;
  landing_.page = static_cast<uint32_t>(position / landing_.page_bytes);
  landing_.offset = position % landing_.page_bytes;
  if (landing_.page < landing_.pages) return;
  --landing_.region->landing;
  landing_.region = nullptr;
  ++received_;
  untold_bytes_ += position;
  if (landing_.counted) context_.completions.immediate(link_.id(), landing_.immediate);
}

Status Connection::take_message(uint32_t slot, std::span<const std::byte> message) {
  if (!link_.put(slot, *this)) {
    return refuse(0, ErrorCode::kInvalidArgument, "a message in a slot whose previous message was not taken");
  }
  context_.completions.message(link_.id(), slot, message);
  return {};
}

void Connection::take(uint32_t slot) {
  messages_taken_ ^= 1U << slot;
  want_turn();
}

Status Connection::take_acknowledgement(const FrameHeader& header) {
  const uint64_t acknowledged = header.acknowledged;
  uint32_t messages = header.messages_taken ^ messages_seen_;
  if (acknowledged < acknowledged_ || acknowledged > sent_ || (messages & ~messages_sent_) != 0) {
    return refuse(0, ErrorCode::kInvalidArgument, "an acknowledgement of a write or message that was never sent");
  }
  messages_seen_ ^= messages;
  messages_sent_ ^= messages;
  for (; messages != 0; messages &= messages - 1) link_.taken(static_cast<uint32_t>(std::countr_zero(messages)));
  while (acknowledged_ < acknowledged) {
    const Unacknowledged done = unacknowledged_.front();
    unacknowledged_.pop_front();
    ++acknowledged_;
    queued_bytes_ -= done.bytes;
    if (!refused_.empty() && refused_.front().sequence == acknowledged_) {
      context_.completions.failed(done.work, std::move(refused_.front().error));
      refused_.pop_front();
    } else {
      context_.completions.done(done.work);
    }
  }
  return {};
}

Status Connection::take_refusal(const FrameHeader& header, std::string_view text) {
  std::string words = "the peer refused a write: " + printable(text);
  const ErrorCode code = refusal_code(header.value);
  // The refusal may arrive before the kernel has taken all of the batch.
  const uint64_t first = 1 + (refused_.empty() ? acknowledged_ : refused_.back().sequence);
  const bool posted = header.sequence >= first && header.sequence <= std::min(posted_, sent_ + 1);
  if (posted) refused_.push_back({header.sequence, tcp_error(code, "write", words)});
  if (code != ErrorCode::kUnknownRegion) return down("write", std::move(words));
  if (!posted) return refuse(0, ErrorCode::kInvalidArgument, "a refusal of a write that was never sent");
  return {};
}

std::unique_ptr<OutgoingFrame> Connection::take_refusal_frame(uint64_t sequence, ErrorCode code, std::string_view why) {
  FrameHeader header;
  header.type = FrameType::kRefusal;
  header.count = static_cast<uint16_t>(std::min(why.size(), kMaxRefusalText));
  header.sequence = sequence;
  header.value = static_cast<uint32_t>(code);
  auto frame = take_frame(header);
  std::memcpy(frame->head.data() + sizeof(header), why.data(), header.count);
  frame->head_bytes = static_cast<uint32_t>(head_bytes(header));
  return frame;
}

Error Connection::refuse(uint64_t sequence, ErrorCode code, const std::string& why) {
  part_with(take_refusal_frame(sequence, code, why));
  return down("receive", "closed the connection because the peer sent " + why);
}

}  // namespace kvc::tcp
