// Connection: one socket of a link, full duplex. Frames of posted batches leave in order, the peer's frames land
// straight in registered memory, and acknowledgements of each direction travel in the headers of the other. Messages
// overtake writes that have not begun to leave; one that the sink refuses waits here, and the peer's window with it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/domain.h"
#include "engine/error.h"
#include "engine/unique_fd.h"
#include "providers/tcp/region_table.h"
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
  uint64_t sent = 0;  // bytes of head and pages that the kernel has taken

  uint64_t total_bytes() const noexcept { return head_bytes + pages * page_bytes; }
};

// What the connections of one domain share. One owner thread.
struct Shared {
  Shared(DomainSink& domain_sink, const Tuning& domain_tuning, Epoll domain_epoll)
      : sink(domain_sink), tuning(domain_tuning), epoll(std::move(domain_epoll)) {}

  DomainSink& sink;
  const Tuning tuning;
  Epoll epoll;
  RegionTable regions;
  std::deque<Connection*> sendable;  // have something to send and no reason to believe that the socket is full
  std::vector<Connection*> holding;  // have messages that the sink refused
  std::vector<std::unique_ptr<OutgoingFrame>> spare_frames;
};

class Connection final : public Watched {
 public:
  Connection(Shared& shared, Link& link, uint16_t index)
      : Watched(Kind::kConnection), shared_(shared), link_(link), index_(index) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  Link& link() noexcept { return link_; }
  // Nothing dialed or accepted yet.
  bool vacant() const noexcept { return state_ == State::kVacant; }
  // Both ends have proved themselves: frames may pass.
  bool up() const noexcept { return state_ == State::kUp; }
  // Posted and not acknowledged.
  uint64_t queued_bytes() const noexcept { return queued_bytes_; }

  // The dialing end: takes a socket that is connecting, will send `hello` and wait for `welcome`.
  Status dial(UniqueFd socket, const Hello& hello, const Welcome& welcome);
  // The listening end: takes an accepted socket, already watched, whose Hello was right, and sends `welcome`.
  Status adopt(UniqueFd socket, const Welcome& welcome);

  // Queues a batch, connected or not. False: the queue is full.
  bool post(const WriteBatch& batch);
  // Queues a message, connected or not. False: too many have not been taken by the peer.
  bool send(WorkId work, std::span<const std::byte> message);
  // Has messages that the sink refused.
  bool holds() const noexcept { return held_slots_ != 0; }

  // epoll reported `events`. An error ends the link; the same for send_turn().
  Status on_events(uint32_t events);
  // Sends up to one turn of what is queued, or an acknowledgement that is due. For `Shared::sendable`.
  Status send_turn();
  // Reads up to one turn.
  Status read_turn();
  // Offers the messages that the sink refused once more; true if it took one. For `Shared::holding`.
  bool offer_held();
  // The connection breaks: takes in the acknowledgements and the refusal that may still lie in the socket.
  void read_last_words();

  // Closes the socket (nothing of the peer lands after this) and leaves the sendable queue. Reports nothing.
  void close();
  // Completes whatever is still posted, with the peer's refusal or else `error`. After close().
  void complete_all(const Error& error);

 private:
  enum class State : uint8_t { kVacant, kConnecting, kGreeting, kUp, kBroken, kClosed };

  // The pages of the frame that is landing.
  struct Landing {
    Region* region = nullptr;  // null: no frame is landing
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
  void queue_ack();
  void want_turn();
  Status watch(bool writable);
  void retire_sent(uint64_t bytes);

  // Receiving.
  Status finish_connecting();
  Status parse_inbox();
  Status take_welcome(bool& taken);
  Status begin_landing(const FrameHeader& header, const std::byte* offsets);
  void land_from_inbox();
  void advance_landing(uint64_t bytes);
  Status take_acknowledgement(const FrameHeader& header);
  Status take_message(uint32_t slot, std::span<const std::byte> message);
  bool owes_acknowledgement() const noexcept { return received_ > told_ || messages_taken_ != messages_told_; }
  Error take_refusal(const FrameHeader& header, std::string_view text);
  // Tells the peer why, as far as the socket takes it at once, and returns the error that ends the link.
  Error refuse(uint64_t sequence, ErrorCode code, std::string why);
  size_t inbox_bytes() const noexcept { return inbox_end_ - inbox_begin_; }

  Shared& shared_;
  Link& link_;
  const uint16_t index_;
  State state_ = State::kVacant;
  UniqueFd socket_;
  Hello hello_;
  Welcome welcome_;
  bool watching_writable_ = false;
  bool in_sendable_ = false;

  std::deque<std::unique_ptr<OutgoingFrame>> unsent_;  // the first one may be partly sent
  std::deque<Unacknowledged> unacknowledged_;          // every posted batch, oldest first
  uint64_t queued_bytes_ = 0;
  uint64_t posted_ = 0;        // sequence of the newest posted write
  uint64_t acknowledged_ = 0;  // sequence of the newest write that the peer has in memory
  uint64_t sent_ = 0;          // sequence of the newest write that the kernel has taken entirely
  std::optional<Refusal> refusal_;

  // Messages, as bits of their slots.
  std::array<WorkId, kMessageSlots> messages_{};  // by slot
  uint32_t messages_posted_ = 0;                  // not taken by the peer yet
  uint32_t messages_sent_ = 0;                    // those of them that the kernel has taken entirely
  uint32_t messages_seen_ = 0;                    // the peer's `messages_taken`, last time
  std::array<Bytes, kMessageSlots> held_;         // messages that the sink refused, by slot
  uint32_t held_slots_ = 0;
  uint32_t messages_taken_ = 0;  // as FrameHeader has it
  uint32_t messages_told_ = 0;   // what the peer has been told of it

  uint64_t received_ = 0;  // writes of the peer that are in memory here
  uint64_t told_ = 0;      // how many of them the peer has been told of
  uint64_t untold_bytes_ = 0;
  Landing landing_;
  // Headers and offsets, and what follows them in the same read: large enough for a whole write of one 4 KiB page,
  // so that it takes one system call. Payload that ends up here is copied on into its page; of a full batch of 64
  // pages of 4 KiB that is less than a thirtieth, of larger pages less.
  std::array<std::byte, 8192> inbox_{};
  size_t inbox_begin_ = 0;
  size_t inbox_end_ = 0;
};

}  // namespace kvc::tcp
