// Connection: one socket of a link, full duplex. Frames of posted batches leave in order, the peer's frames land
// straight in registered memory, and acknowledgements of each direction travel in the headers of the other. Messages
// overtake writes that have not begun to leave.
//
// It ends in two steps, so that what has landed or was taken here is no failure at the peer: part() acknowledges it and
// ends our direction; the peer's direction is read on (the link fails) or handed over unread (the link is fenced).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/unique_fd.h"
#include "lane/domain.h"
#include "lane/region_table.h"
#include "providers/tcp/lingering_sockets.h"
#include "providers/tcp/link_end.h"
#include "providers/tcp/socket.h"
#include "providers/tcp/tuning.h"
#include "providers/tcp/wire.h"

namespace kvc::tcp {

class Connection;
class Link;

// A frame on its way out. `head` is header and offsets; `sources` are read by the kernel when it is sent.
struct OutgoingFrame {
  FrameType type = FrameType::kAck;
  std::array<std::byte, kMaxHeadBytes> head{};
  std::array<const std::byte*, kMaxPages> sources{};
  Bytes message;  // what sources[0] of a message points to
  uint32_t slot = 0;
  uint32_t head_bytes = 0;
  uint32_t pages = 0;
  uint64_t page_bytes = 0;
  uint64_t refused = 0;  // a refusal of one batch alone: its sequence
  uint64_t sent = 0;     // bytes of head and pages that the kernel has taken

  uint64_t total_bytes() const noexcept { return head_bytes + pages * page_bytes; }
};

// What the connections of one domain share. One owner thread.
struct LinkContext {
  LinkContext(CompletionQueue& domain_completions, ControlQueue& domain_control,
              std::shared_ptr<LingeringSockets> domain_lingering, const Tuning& domain_tuning, Epoll domain_epoll)
      : completions(domain_completions),
        control(domain_control),
        lingering(std::move(domain_lingering)),
        tuning(domain_tuning),
        epoll(std::move(domain_epoll)) {}

  CompletionQueue& completions;
  ControlQueue& control;
  const std::shared_ptr<LingeringSockets> lingering;  // the control thread's
  const Tuning tuning;
  Epoll epoll;
  RegionTable regions;
  std::deque<Connection*> sendable;  // have something to send and no reason to believe that the socket is full
  std::vector<std::unique_ptr<OutgoingFrame>> spare_frames;
};

class Connection final : public Watched {
 public:
  Connection(LinkContext& context, Link& link, uint16_t index)
      : Watched(Kind::kConnection), context_(context), link_(link), index_(index) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() { end(); }

  Link& link() noexcept { return link_; }
  // Nothing dialled or accepted yet.
  bool vacant() const noexcept { return state_ == State::kVacant; }
  // Both ends have proved themselves: frames may pass.
  bool up() const noexcept { return state_ == State::kUp; }
  // Nothing of the peer lands any more.
  bool ended() const noexcept { return state_ == State::kEnded; }
  // Posted and not acknowledged.
  uint64_t queued_bytes() const noexcept { return queued_bytes_; }

  // The dialling end.
  Status dial(Dialled dialled);
  // The listening end: a socket whose Hello was right and which has been welcomed.
  Status adopt(UniqueFd socket);

  // Queues a batch, connected or not. False: the queue is full.
  bool post(const WriteBatch& batch);
  // Queues a message, connected or not.
  void send(uint32_t slot, std::span<const std::byte> message);
  // The message that came in this slot is in our engine's hands.
  void take(uint32_t slot);

  // epoll reported `events`. An error fails the link, and this connection has ended.
  Status on_events(uint32_t events);
  // Sends up to one turn of what is queued, or an acknowledgement that is due. For `LinkContext::sendable`. An error
  // fails the link; the peer's direction may still hold something.
  Status send_turn();

  // Says the last words, as far as the socket takes them at once: an acknowledgement of what is in memory and of what was
  // taken, where that is due. Then ends our direction. Idempotent.
  void part() { part_with(nullptr); }
  // Parts, and gives the socket away: nothing of the peer lands after this. Completes nothing. Idempotent.
  void end();
  // Completes whatever is still posted, with the peer's refusal or else `error`. After end().
  void complete_all(const Error& error);

 private:
  enum class State : uint8_t { kVacant, kConnecting, kGreeting, kUp, kEnded };

  // The pages of the frame that is landing.
  struct Landing {
    Registration* region = nullptr;  // null: no frame is landing
    std::array<std::byte*, kMaxPages> targets{};
    uint32_t pages = 0;
    uint64_t page_bytes = 0;
    uint32_t page = 0;    // the next byte goes to targets[page] + offset
    uint64_t offset = 0;  // < page_bytes
    bool counted = false;
    uint32_t immediate = 0;
  };
  struct Unacknowledged {
    WorkId work = 0;
    uint64_t bytes = 0;
  };
  struct Refusal {
    uint64_t sequence = 0;
    Error error;
  };

  // Sending.
  std::unique_ptr<OutgoingFrame> take_frame(const FrameHeader& header);
  void drop_frame(std::unique_ptr<OutgoingFrame> frame);
  void want_turn();
  Status watch(bool writable);
  // Gives the kernel up to one turn of the unsent frames. False: the socket is full.
  Result<bool> transmit();
  void retire_sent(uint64_t bytes);

  // Receiving.
  Status finish_connecting();
  Status read_turn();
  // All that is there, at a cost for each frame.
  Status parse_inbox(uint64_t& budget);
  Status take_welcome(bool& taken);
  Status begin_landing(const FrameHeader& header, const std::byte* offsets);
  void land_from_inbox();
  void advance_landing(uint64_t bytes);
  Status take_acknowledgement(const FrameHeader& header);
  Status take_message(uint32_t slot, std::span<const std::byte> message);
  bool owes_acknowledgement() const noexcept { return received_ > told_ || messages_taken_ != messages_told_; }
  // Notes which batch it is of. An error: of more than that batch, and the connection ends with it.
  Status take_refusal(const FrameHeader& header, std::string_view text);
  std::unique_ptr<OutgoingFrame> take_refusal_frame(uint64_t sequence, ErrorCode code, std::string_view why);
  // Refuses the batch alone, whose pages are read and dropped: its writer may have raced our deregistration.
  Status skip(const FrameHeader& header, ErrorCode code, const std::string& why);
  // Drops what is there of such pages. True: all of them.
  bool skip_from_inbox();
  // Tells the peer why, as its last words, and returns the error that fails the link.
  Error refuse(uint64_t sequence, ErrorCode code, const std::string& why);
  void part_with(std::unique_ptr<OutgoingFrame> last_words);
  size_t inbox_bytes() const noexcept { return inbox_end_ - inbox_begin_; }

  LinkContext& context_;
  Link& link_;
  const uint16_t index_;
  State state_ = State::kVacant;
  UniqueFd socket_;
  Hello hello_;
  Welcome welcome_;
  bool watching_writable_ = false;
  bool in_sendable_ = false;
  bool parted_ = false;  // our direction has ended

  std::deque<std::unique_ptr<OutgoingFrame>> unsent_;  // the first one may be partly sent
  std::deque<Unacknowledged> unacknowledged_;          // every posted batch, oldest first
  uint64_t queued_bytes_ = 0;
  uint64_t posted_ = 0;          // sequence of the newest posted write
  uint64_t acknowledged_ = 0;    // sequence of the newest write that the peer has in memory, or has refused
  uint64_t sent_ = 0;            // sequence of the newest write that the kernel has taken entirely
  std::deque<Refusal> refused_;  // of posted writes that are not acknowledged, oldest first

  // Messages, as bits of their slots.
  uint32_t messages_sent_ = 0;   // the kernel has taken them entirely, the peer's engine has not
  uint32_t messages_seen_ = 0;   // the peer's `messages_taken`, last time
  uint32_t messages_taken_ = 0;  // as FrameHeader has it
  uint32_t messages_told_ = 0;   // what the peer has been told of it

  uint64_t received_ = 0;  // writes of the peer that are in memory here, or were refused alone
  uint64_t told_ = 0;      // how many of them the peer has been told of
  uint64_t untold_bytes_ = 0;
  Landing landing_;
  uint64_t skipping_ = 0;  // bytes to come of a write that was refused alone
  // Headers and offsets, and what follows them in the same read: large enough for a whole write of one 4 KiB page,
  // so that it takes one system call. Payload that ends up here is copied on into its page; of a full batch of 64
  // pages of 4 KiB that is less than a thirtieth, of larger pages less.
  std::array<std::byte, 8192> inbox_{};
  size_t inbox_begin_ = 0;
  size_t inbox_end_ = 0;
};

}  // namespace kvc::tcp
