// Link: the two queue pairs of a connection, one for writes and one for messages. If one breaks, both end. The one for
// messages may outlive the other until a goodbye is sent.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "lane/domain.h"
#include "lane/work_slots.h"
#include "providers/verbs/connection.h"
#include "providers/verbs/link_context.h"
#include "providers/verbs/queue_pair_teardown.h"
#include "providers/verbs/remainder.h"
#include "providers/verbs/send_queue.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs {

// Used on the domain's thread only. Nothing here blocks.
class Link {
 public:
  Link(LinkContext& context, LinkId id, const Connection& connection);
  // Leaves the remaining queue pairs to the control thread.
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  LinkId id() const noexcept { return id_; }
  bool up() const noexcept { return state_ == State::kUp; }
  bool ending() const noexcept { return state_ == State::kEnding; }
  // Whether this may be a key of the peer's domain.
  bool knows_key(uint64_t key) const noexcept { return key >> 32 == peer_key_half_; }
  // The numbers of its queue pairs.
  std::array<uint32_t, 2> numbers() const noexcept { return {writes_.pair()->number(), messages_.pair()->number()}; }

  // --- Writes.

  // Posts a batch. Returns kBusy until the transport is up and has room, and after the link's end.
  Posted post(const WriteBatch& batch);
  // Whether a batch is partly posted, because the queue had no room for all of it.
  bool has_rest() const noexcept { return rest_ != nullptr; }
  bool can_continue() const noexcept { return has_rest() && up() && writes_.room() > 0; }
  // Posts as much of it as fits. Returns true if anything was posted.
  bool continue_rest();
  // Checks whether the peer is alive, by a write of 0 bytes that fails if the peer is gone. Does nothing if a post in
  // flight will show it.
  void ask();
  // Counts an immediate of the peer that has landed here.
  void count_landed() noexcept { ++landed_; }

  // --- Messages.

  Posted send(WorkId work, std::span<const std::byte> message);
  // Records that the peer's message of this slot has arrived. Returns false if the peer may not use that slot now.
  bool arrived(uint32_t slot) noexcept;
  // Records that the transfer engine has taken the message. say_owed() notifies the peer.
  void take(uint32_t slot) noexcept;
  // owes() returns whether a hello or acknowledgement is due, can_say() whether there is room to send it.
  bool owes() const noexcept { return up() && (owes_hello_ || owes_taken_ != 0); }
  bool can_say() const noexcept { return messages_.room() > 0; }
  // Sends what is due. Returns false if something is left.
  bool say_owed();

  // --- The peer's control messages. A result of false means that the peer may not send that now.

  bool hear_hello() noexcept;
  bool hear_taken(uint32_t slots, CompletionQueue& out);
  // Records the goodbye: this many of our immediates have landed at the peer, and no more will.
  void hear_goodbye(uint16_t landed) noexcept { landed_there_ = landed; }

  // --- Completions of what was posted.

  // Returns the meaning of a post that completed well, and frees its buffer. Returns nothing if the queue has no such
  // post.
  std::optional<Sent> completed(const WorkRequestId& request);
  // Records the first post that failed. Its batch completes with this error, and all others with the link's error.
  void failed(const WorkRequestId& request, const Error& error) { failure_ = Failure{request, error}; }
  // Gives up the goodbye: the queue pair for messages has failed while the link ends.
  void fall_silent() { messages_end_.begin(context_.control); }

  // set when a queue pair has refused a post, until the domain handles it
  std::optional<Error> fault;

  // --- The end.

  // Ends the link, unless it is ending already. All that is posted completes with `why`. If `goodbye`, the peer
  // receives a goodbye, if possible.
  void end(const Error& why, bool goodbye, Clock::time_point now);
  // Records that the queue pair has flushed its last receive.
  void note_last_receive(uint32_t number) noexcept;
  // Continues the link's end. Returns true if there was progress. `out` receives what was posted, once nothing reads
  // from it or lands any more.
  bool step(Clock::time_point now, CompletionQueue& out);
  // Whether nothing can land any more, everything that landed is counted, and everything that was posted has completed.
  bool closed() const noexcept { return closed_; }
  // Whether nothing is left of the link.
  bool over() const noexcept { return writes_end_.over() && messages_end_.over(); }
  // Whether its goodbye is not sent yet, or the peer's NIC has not acknowledged it.
  bool parting() const noexcept { return ending() && goodbye_ != Goodbye::kNone && !messages_end_.begun(); }
  // The time by which step() must be called even if nothing happens.
  std::optional<Clock::time_point> deadline() const noexcept;

  // State of an ending link, set by the domain.
  std::optional<Error> down;  // the error to report once the link is closed
  bool fenced = false;        // the transfer engine has fenced the link and does not use it any more

 private:
  enum class State : uint8_t {
    kAccepted,  // receives, but may not post until the offering side's hello reports that it is ready
    kUp,
    kEnding,
  };
  enum class Goodbye : uint8_t { kNone, kOwed, kSaid };

  SendQueue& queue(WorkRequestId::Kind kind) noexcept {
    return kind == WorkRequestId::Kind::kWrite ? writes_ : messages_;
  }
  // Posts as much of `batch` as fits.
  Status post_pieces(Remainder& batch);
  // Writes the next `count` pieces of `batch` into the chain.
  void fill(Remainder& batch, uint32_t count);
  // Sends a control message. Returns false if there is no room. If a queue pair refuses it, `fault` is set.
  bool say(const Control& control);
  bool post_message(std::span<const std::byte> message, const Control& control);
  bool say_goodbye();
  void close(CompletionQueue& out);

  LinkContext& context_;
  const LinkId id_;
  const uint32_t peer_key_half_;
  State state_;
  SendQueue writes_;
  SendQueue messages_;

  std::unique_ptr<Remainder> rest_;
  uint16_t counted_ = 0;                  // number of our posted immediates
  uint16_t landed_ = 0;                   // number of the peer's immediates that have landed here
  std::optional<uint16_t> landed_there_;  // number of our immediates that have landed at the peer, from its goodbye

  SentMessages sent_messages_;
  uint32_t untaken_ = 0;  // the peer's slots whose messages the transfer engine has not taken, a bit each
  uint32_t owes_taken_ = 0;
  bool owes_hello_;

  QueuePairTeardown writes_end_;
  QueuePairTeardown messages_end_;
  Goodbye goodbye_ = Goodbye::kNone;
  Clock::time_point goodbye_deadline_;
  Error why_;
  struct Failure {
    WorkRequestId request;
    Error error;
  };
  std::optional<Failure> failure_;  // the post that broke the link
  bool closed_ = false;
};

}  // namespace kvc::verbs
