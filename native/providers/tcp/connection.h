// Connection: one socket of a link, full duplex. Frames of posted batches leave in order. The peer's frames land
// straight in registered memory. Headers of one direction carry the acknowledgements of the other direction. Messages
// overtake writes that have not begun to leave.
//
// A connection ends in two steps, so that the peer does not count as failed what has landed or was taken here. part()
// acknowledges that, and ends our direction. Afterwards the peer's direction is read on (if the link fails) or handed
// over unread (if the link is fenced).
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

// An outgoing frame. `head` is header and offsets. The kernel reads `sources` when the frame is sent.
struct OutgoingFrame {
  FrameType type = FrameType::kAck;
  std::array<std::byte, kMaxHeadBytes> head{};
  std::array<const std::byte*, kMaxPages> sources{};
  Bytes message;  // a message's bytes, to which its sources[0] points
  uint32_t slot = 0;
  uint32_t head_bytes = 0;
  uint32_t pages = 0;
  uint64_t page_bytes = 0;
  uint64_t refused = 0;  // sequence of the refused batch, for a refusal of one batch alone
  uint64_t sent = 0;     // bytes of head and pages that the kernel has taken

  uint64_t total_bytes() const noexcept { return head_bytes + pages * page_bytes; }
};

// State that the connections of one domain share. Used by one thread, the domain's.
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
  const std::shared_ptr<LingeringSockets> lingering;  // used on the control thread
  const Tuning tuning;
  Epoll epoll;
  RegionTable regions;
  std::deque<Connection*> sendable;  // have something to send, and the socket is not known to be full
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
  // Whether nothing was dialled or accepted yet.
  bool vacant() const noexcept { return state_ == State::kVacant; }
  // Whether both ends have proved themselves, so that frames may pass.
  bool up() const noexcept { return state_ == State::kUp; }
  // Whether nothing of the peer can land any more.
  bool ended() const noexcept { return state_ == State::kEnded; }
  // Bytes that are posted and not acknowledged.
  uint64_t queued_bytes() const noexcept { return queued_bytes_; }

  // Takes the dialled socket, for the dialling end.
  Status dial(Dialled dialled);
  // Takes an accepted socket, for the listening end. Its Hello was right, and the connector has sent the Welcome.
  Status adopt(UniqueFd socket);

  // Queues a batch, whether or not the connection is up. Returns false if the queue is full.
  bool post(const WriteBatch& batch);
  // Queues a message, whether or not the connection is up. Copies the bytes.
  void send(uint32_t slot, std::span<const std::byte> message);
  // Records that our transfer engine has taken the message of this slot.
  void take(uint32_t slot);

  // Handles `events` of epoll. If this returns an error, the link fails and this connection has ended.
  Status on_events(uint32_t events);
  // Sends up to one turn of the queued frames, or an acknowledgement that is due. Called for members of
  // `LinkContext::sendable`. If this returns an error, the link fails; the peer's direction may still hold unread
  // bytes.
  Status send_turn();

  // Sends the last words, as far as the socket takes them at once: an acknowledgement of what is in memory and of what
  // was taken, if one is due. Then ends our direction. Idempotent.
  void part() { part_with(nullptr); }
  // Parts and gives the socket away: nothing of the peer lands after this. Completes no work. Idempotent.
  void end();
  // Completes all work that is still posted, with the peer's refusal or else with `error`. Call it after end().
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
  // Gives the kernel up to one turn of the unsent frames. Returns false if the socket is full.
  Result<bool> transmit();
  void retire_sent(uint64_t bytes);

  // Receiving.
  Status finish_connecting();
  Status read_turn();
  // Parses all that is in the inbox, and charges a cost for each frame.
  Status parse_inbox(uint64_t& budget);
  Status take_welcome(bool& taken);
  Status begin_landing(const FrameHeader& header, const std::byte* offsets);
  void land_from_inbox();
  void advance_landing(uint64_t bytes);
  Status take_acknowledgement(const FrameHeader& header);
  Status take_message(uint32_t slot, std::span<const std::byte> message);
  bool owes_acknowledgement() const noexcept { return received_ > told_ || messages_taken_ != messages_told_; }
  // Records the refused batch. Returns an error if the refusal concerns more than that batch; the connection ends with
  // it.
  Status take_refusal(const FrameHeader& header, std::string_view text);
  std::unique_ptr<OutgoingFrame> take_refusal_frame(uint64_t sequence, ErrorCode code, std::string_view why);
  // Refuses this batch alone, and drops its pages as they arrive: its writer may have raced our deregistration.
  Status skip(const FrameHeader& header, ErrorCode code, const std::string& why);
  // Drops the arrived bytes of such pages. Returns true once all of them are dropped.
  bool skip_from_inbox();
  // Sends the reason to the peer as the last words, and returns the error that fails the link.
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

  std::deque<std::unique_ptr<OutgoingFrame>> unsent_;  // the first frame may be partly sent
  std::deque<Unacknowledged> unacknowledged_;          // every posted batch, oldest first
  uint64_t queued_bytes_ = 0;
  uint64_t posted_ = 0;          // sequence of the newest posted write
  uint64_t acknowledged_ = 0;    // sequence of the newest write that the peer has in memory or has refused
  uint64_t sent_ = 0;            // sequence of the newest write that the kernel has taken entirely
  std::deque<Refusal> refused_;  // refusals of posted writes that are not acknowledged, oldest first

  // Messages, as bits of their slots.
  uint32_t messages_sent_ = 0;   // taken entirely by the kernel, but not by the peer's transfer engine
  uint32_t messages_seen_ = 0;   // the peer's latest `messages_taken`
  uint32_t messages_taken_ = 0;  // as FrameHeader has it
  uint32_t messages_told_ = 0;   // the value of messages_taken_ that was last sent to the peer

  uint64_t received_ = 0;  // the peer's writes that are in memory here, or were refused alone
  uint64_t told_ = 0;      // the value of received_ that was last sent to the peer
  uint64_t untold_bytes_ = 0;
  Landing landing_;
  uint64_t skipping_ = 0;  // outstanding bytes of a write that was refused alone
  // Headers and offsets, and the bytes that follow them in the same read. The inbox is large enough for a whole write
  // of one 4 KiB page, so that such a write takes one system call. Payload that ends up here is copied on into its
  // page. For a full batch of 64 pages of 4 KiB that is less than a thirtieth of its bytes, and less for larger pages.
  std::array<std::byte, 8192> inbox_{};
  size_t inbox_begin_ = 0;
  size_t inbox_end_ = 0;
};

}  // namespace kvc::tcp
