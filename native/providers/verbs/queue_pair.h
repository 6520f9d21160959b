// QueuePair: one reliable connected queue pair, and our accounts of what is posted on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "engine/domain.h"
#include "providers/verbs/device.h"
#include "providers/verbs/handle.h"
#include "providers/verbs/memory.h"
#include "providers/verbs/tuning.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs {

// Room in the completion queue, shared by all queue pairs of a domain: after an error every posted request, signalled
// or not, may take an entry.
using Credits = uint32_t;

// A signalled post: what its completion means.
struct Sent {
  std::optional<WorkId> work{};      // reported to the sink when this completes
  Region* source = nullptr;          // read from until then
  std::optional<uint32_t> buffer{};  // a message's buffer, free again then
  uint32_t sequence = 0;
  uint32_t slots = 0;
};

class QueuePair {
 public:
  struct Queues {
    abi::ibv_cq* completions;
    abi::ibv_srq* receives;
  };

  // A queue pair in INIT: it exists, takes nothing in and sends nothing. `access`: what its peer may do to our memory.
  static Result<QueuePair> create(const Device& device, const Queues& queues, const Tuning& tuning, uint32_t slots,
                                  unsigned access, Credits& credits);
  QueuePair(QueuePair&&) noexcept = default;

  // What the peer needs to know; the PSN is random, so that what is left in the network of an earlier queue pair of
  // the same number is not taken for ours.
  QueueEnd end() const noexcept { return {qp_->qp_num, psn_}; }
  uint32_t number() const noexcept { return qp_->qp_num; }

  // INIT to RTR: takes in what the peer sends, numbered from the peer's PSN on.
  Status receive_from(const Path& path, const QueueEnd& peer);
  // RTR to RTS: may send, numbered from our own PSN on.
  Status start_sending();
  // To ERR: nothing moves any more in either direction.
  void stop() noexcept;

  // --- Sending.
  uint32_t room() const noexcept { return std::min(slots_ - used_, *credits_); }
  uint32_t slots() const noexcept { return slots_; }
  uint32_t inline_bytes() const noexcept { return inline_bytes_; }
  uint32_t next_sequence() const noexcept { return sequence_; }
  // Posts a chain of `count` requests, at most room(), the last one signalled; all carry next_sequence() in their ids.
  // Returns how many were taken: fewer than `count` where the library is out of memory (the signalled one then was
  // not); the caller posts the rest later. `sent` is what the completion of the last one means.
  Result<uint32_t> post(abi::ibv_send_wr* first, uint32_t count, Sent sent);
  // The post of this sequence has completed, and with it all before it. nullopt: there is no such post.
  std::optional<Sent> completed(uint32_t sequence);
  bool idle() const noexcept { return posted_.empty(); }
  // Destroys the queue pair; returns what was posted on it and has not completed.
  std::deque<Sent> destroy();

 private:
  QueuePair(const Device& device, const Tuning& tuning, Credits& credits, Owned<abi::ibv_qp> qp);
  Status modify(abi::ibv_qp_attr& attr, int mask, const char* to);

  const Device* device_;
  const Tuning* tuning_;
  Credits* credits_;
  Owned<abi::ibv_qp> qp_;
  uint32_t psn_;
  uint32_t slots_ = 0;
  uint32_t inline_bytes_ = 0;
  uint32_t used_ = 0;         // slots posted and not known to be free again
  uint32_t unsignalled_ = 0;  // of those, the ones that the next signalled post will free
  uint32_t sequence_ = 0;
  std::deque<Sent> posted_;
};

}  // namespace kvc::verbs
