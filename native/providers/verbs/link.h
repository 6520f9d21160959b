// Link: what goes over the two queue pairs of a connection, one for writes and one for messages. They live and break
// together; the one for messages may outlive the other by a goodbye.
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

// One thread: the domain's. Nothing here blocks.
class Link {
 public:
  Link(LinkContext& context, LinkId id, const Connection& connection);
  // Leaves the queue pairs, if they are not gone yet, to the control thread.
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  LinkId id() const noexcept { return id_; }
  bool up() const noexcept { return state_ == State::kUp; }
  bool ending() const noexcept { return state_ == State::kEnding; }
  // Whether this may be a key of the domain at the other end.
  bool knows_key(uint64_t key) const noexcept { return key >> 32 == peer_key_half_; }
  // The numbers of its queue pairs.
  std::array<uint32_t, 2> numbers() const noexcept { return {writes_.pair()->number(), messages_.pair()->number()}; }

  // --- Writes.

  // kBusy until the transport is up and has room, and from the link's end on.
  Posted post(const WriteBatch& batch);
  // The rest of a batch that the queue had no room for.
  bool has_rest() const noexcept { return rest_ != nullptr; }
  bool can_continue() const noexcept { return has_rest() && up() && writes_.room() > 0; }
  // Posts of it what fits; true if anything was posted.
  bool continue_rest();
  // Unless something is in flight that will tell: writes nothing to the peer, which fails if the peer is gone.
  void ask();
  // One of the peer's has landed here.
  void count_landed() noexcept { ++landed_; }

  // --- Messages.

  Posted send(WorkId work, std::span<const std::byte> message);
  // The peer's message of this slot has come. False: it has no right to that slot.
  bool arrived(uint32_t slot) noexcept;
  // The engine has it: say_owed() tells the peer.
  void take(uint32_t slot) noexcept;
  // Whether the peer has to hear something, and whether that can be said.
  bool owes() const noexcept { return up() && (owes_hello_ || owes_taken_ != 0); }
  bool can_say() const noexcept { return messages_.room() > 0; }
  // False: not all of it, yet.
  bool say_owed();

  // --- What the peer says of itself. False: it has no right to say that.

  bool hear_hello() noexcept;
  bool hear_taken(uint32_t slots, CompletionQueue& out);
  // So many of our immediates have landed there, and no more will.
  void hear_goodbye(uint16_t landed) noexcept { landed_there_ = landed; }

  // --- Completions of what was posted.

  // A post ended well: what it meant, and its buffer is free. Nothing: this queue has no such post.
  std::optional<Sent> completed(const WorkRequestId& request);
  // The first one that failed: its batch ends with this error, the others with the link's.
  void failed(const WorkRequestId& request, const Error& error) { failure_ = Failure{request, error}; }
  // The queue pair for messages has failed while the link ends: it says nothing any more.
  void fall_silent() { messages_end_.begin(context_.control); }

  // A queue pair took no more, and the domain has not seen to that yet.
  std::optional<Error> fault;

  // --- The end.

  // Ends the link, if it is not ending already; `why` is what is posted on it completes with. `goodbye`: the peer hears of
  // it, if it still can.
  void end(const Error& why, bool goodbye, Clock::time_point now);
  // The queue pair has flushed its last receive.
  void note_last_receive(uint32_t number) noexcept;
  // True if its end came any further. `out` gets what was posted, once nothing reads from it or lands any more.
  bool step(Clock::time_point now, CompletionQueue& out);
  // Nothing can land, everything that did is counted, and everything that was posted has completed.
  bool closed() const noexcept { return closed_; }
  // Nothing is left of it.
  bool over() const noexcept { return writes_end_.over() && messages_end_.over(); }
  // It has not yet said goodbye, or the peer's NIC has not acknowledged that.
  bool parting() const noexcept { return ending() && goodbye_ != Goodbye::kNone && !messages_end_.begun(); }
  // When step() is to be called although nothing happens.
  std::optional<Clock::time_point> deadline() const noexcept;

  // The domain's notes of an ending link.
  std::optional<Error> down;  // the engine is to be told, once it is closed
  bool fenced = false;        // no affair of the engine's any more

 private:
  enum class State : uint8_t {
    kAccepted,  // takes in what comes; may not post until the offerer's hello says that it is ready
    kUp,
    kEnding,
  };
  enum class Goodbye : uint8_t { kNone, kOwed, kSaid };

  SendQueue& queue(WorkRequestId::Kind kind) noexcept {
    return kind == WorkRequestId::Kind::kWrite ? writes_ : messages_;
  }
  // Posts what fits of `batch`.
  Status post_pieces(Remainder& batch);
  // The next `count` pieces of `batch`, into the chain.
  void fill(Remainder& batch, uint32_t count);
  // False: not now. A queue pair that takes nothing more is a fault.
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
  uint16_t counted_ = 0;                  // our immediates, posted
  uint16_t landed_ = 0;                   // the peer's, landed here
  std::optional<uint16_t> landed_there_;  // ours, by its goodbye

  SentMessages sent_messages_;
  uint32_t untaken_ = 0;  // the peer's slots whose messages the engine has not taken, a bit each
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
