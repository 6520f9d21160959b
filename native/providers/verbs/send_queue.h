// SendQueue: our accounts of what is posted on one queue pair.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "lane/domain.h"
#include "providers/verbs/queue_pair.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs {

// Room in the completion queue, shared by all queue pairs of a domain: after an error every posted request, signalled
// or not, may take an entry.
using Credits = uint32_t;

// A signalled post: what its completion means.
struct Sent {
  std::optional<WorkId> work{};      // ends with it
  std::optional<uint32_t> buffer{};  // a message's buffer, free again then
  uint16_t landed_at = 0;            // writes: landed once the peer has counted so many immediates (Control::kGoodbye)
  uint32_t sequence = 0;
  uint32_t slots = 0;
};

// One thread: the domain's.
class SendQueue {
 public:
  SendQueue(std::shared_ptr<QueuePair> pair, Credits& credits) : pair_(std::move(pair)), credits_(&credits) {}

  const std::shared_ptr<QueuePair>& pair() const noexcept { return pair_; }
  uint32_t room() const noexcept { return std::min(pair_->slots() - used_, *credits_); }
  uint32_t next_sequence() const noexcept { return sequence_; }
  // Posts a chain of `count` requests, at most room(), the last one signalled; all carry next_sequence() in their ids.
  // Returns how many were taken: fewer than `count` where the library is out of memory (the signalled one then was
  // not); the caller posts the rest later. `sent` is what the completion of the last one means.
  Result<uint32_t> post(abi::ibv_send_wr* first, uint32_t count, Sent sent);
  // The post of this sequence has completed, and with it all before it. Nothing: there is no such post.
  std::optional<Sent> completed(uint32_t sequence);
  bool idle() const noexcept { return posted_.empty(); }
  // The queue pair is gone: what was posted on it and has not completed.
  std::deque<Sent> give_up();

 private:
  std::shared_ptr<QueuePair> pair_;
  Credits* credits_;
  uint32_t used_ = 0;         // slots posted and not known to be free again
  uint32_t unsignalled_ = 0;  // of those, the ones that the next signalled post will free
  // Begins just before its end, so that it wraps around on every link that is used, and not once in years.
  uint32_t sequence_ = WorkRequestId::kSequenceMask - 1;
  std::deque<Sent> posted_;
};

}  // namespace kvc::verbs
