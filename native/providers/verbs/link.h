// Link: the two queue pairs between this domain and one domain of a peer, one for writes and one for messages. They
// live and break together.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "engine/domain.h"
#include "engine/immediate.h"
#include "providers/verbs/device.h"
#include "providers/verbs/memory.h"
#include "providers/verbs/queue_pair.h"
#include "providers/verbs/remainder.h"
#include "providers/verbs/send_buffers.h"
#include "providers/verbs/tuning.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs {

// Work requests of a batch, chained and filled in once; a post changes only what differs.
class WriteChain {
 public:
  static constexpr uint32_t kLength = Immediate::kMaxMultiplicity;

  WriteChain();
  // Ends the chain after `count` requests; mend() undoes it.
  void cut(uint32_t count) noexcept { requests_[count - 1].next = nullptr; }
  void mend(uint32_t count) noexcept {
    if (count < kLength) requests_[count - 1].next = &requests_[count];
  }
  abi::ibv_send_wr& request(uint32_t i) noexcept { return requests_[i]; }
  abi::ibv_sge& piece(uint32_t i) noexcept { return pieces_[i]; }

 private:
  std::array<abi::ibv_send_wr, kLength> requests_{};
  std::array<abi::ibv_sge, kLength> pieces_{};
};

// What a domain's links share.
struct Shared {
  std::unique_ptr<Device> device;
  Tuning tuning;
  RegionTable regions{};
  std::unique_ptr<SendBuffers> buffers{};
  Credits credits = 0;
  WriteChain chain{};
  Remainder posting{};  // the batch that is being posted
};

class Link {
 public:
  // Messages sent and not taken by the peer's sink; what a peer that does not read can make us hold is as much.
  static constexpr uint32_t kMessages = 16;

  enum class State : uint8_t {
    kOffered,   // offer(): the peer is not known yet
    kAccepted,  // accept(): takes in what comes; may not send until the offerer's hello says that it is ready
    kUp,
  };
  struct Broken {
    Error error;
    std::optional<WorkRequestId> request{};  // the one that failed, if one did
    bool by_peer = false;                    // its goodbye: it needs none of ours
  };

  Link(Shared& shared, LinkId id, QueuePair writes, QueuePair messages);

  LinkId id() const noexcept { return id_; }
  State state() const noexcept { return state_; }
  // Whether this may be a key of the domain at the other end. Not before the peer is known: kOffered.
  bool knows_key(uint64_t key) const noexcept { return key >> 32 == peer_key_half_; }
  QueuePair& queue(WorkRequestId::Kind kind) noexcept {
    return kind == WorkRequestId::Kind::kWrite ? writes_ : messages_;
  }
  // Our end, as the peer needs it; `offered` is the offering side's id of the link.
  Endpoint endpoint(LinkId offered, const Address& address) const;

  // The accepting side: both queue pairs take in what the peer sends.
  Status accept(const Path& path, const Endpoint& peer);
  // The accepting side: the peer's hello is here.
  Status open();
  // The offering side: both queue pairs are ready both ways, then the peer is told.
  Status complete(const Path& path, const Endpoint& peer);

  // `source` holds the batch's pages; null for one that has no bytes.
  Posted post(const WriteBatch& batch, Region* source);
  // The rest of a batch that the queue had no room for.
  bool has_rest() const noexcept { return rest_ != nullptr; }
  bool can_continue() const noexcept { return has_rest() && !broken && writes_.room() > 0; }
  // Posts of it what fits; true if anything was posted.
  bool continue_rest();

  // Unless something is in flight that will tell: writes nothing to the peer, which fails if the peer is gone.
  void ask();

  Posted send(WorkId work, std::span<const std::byte> message);
  // The peer took these messages of ours: a bit for each of its slots.
  void taken(uint32_t slots, DomainSink& sink);
  // We took the peer's message of this slot; say_taken() tells it, as soon as there is room for that.
  void took(uint32_t slot) noexcept { took_ |= 1U << slot; }
  bool owes_taken() const noexcept { return took_ != 0; }
  bool say_taken();
  Status say_goodbye() { return say(Control{Control::Kind::kGoodbye}); }

  // A post completed well: what it meant. nullopt: this queue has no such post.
  std::optional<Sent> completed(const WorkRequestId& request);
  // Frees what a post held: its buffer, its hold on the region.
  void release(const Sent& sent);

  // Destroys a queue pair and completes what was posted on it: with the link's own error the post that broke it, with
  // `error` the others.
  void destroy(WorkRequestId::Kind kind, const Error& error, DomainSink& sink);
  // Completes the messages that were not taken; their queue pair may live on for a goodbye, and their buffers with it.
  void give_up_messages(const Error& error, DomainSink& sink);

  std::optional<Broken> broken;  // waits to be ended by the domain

 private:
  bool broke(WorkRequestId::Kind kind, uint32_t sequence) const noexcept;
  // Posts what fits of `batch`.
  Status post_pieces(Remainder& batch);
  // The next `count` pieces of `batch`, into the chain.
  void fill(Remainder& batch, uint32_t count);
  Status say(const Control& control);
  Result<uint32_t> post_message(std::span<const std::byte> message, const Control& control);

  Shared& shared_;
  const LinkId id_;
  State state_ = State::kOffered;
  uint32_t peer_key_half_ = 0;
  QueuePair writes_;
  QueuePair messages_;
  std::unique_ptr<Remainder> rest_;
  std::array<std::optional<WorkId>, kMessages> untaken_{};
  uint32_t took_ = 0;
};

}  // namespace kvc::verbs
