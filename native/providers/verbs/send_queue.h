// SendQueue: this side's account of the posts on one queue pair.
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

// Room in the completion queue, shared by all queue pairs of a domain. After an error every posted request may take an
// entry, signalled or not.
using Credits = uint32_t;

// The meaning of a signalled post's completion.
struct Sent {
  std::optional<WorkId> work{};      // the work that it completes
  std::optional<uint32_t> buffer{};  // a message's buffer that it frees
  // writes: they have landed once the peer has counted this many immediates (Control::kGoodbye)
  uint16_t landed_at = 0;
  uint32_t sequence = 0;
  uint32_t slots = 0;
};

// Used on the domain's thread only.
class SendQueue {
 public:
  SendQueue(std::shared_ptr<QueuePair> pair, Credits& credits) : pair_(std::move(pair)), credits_(&credits) {}

  const std::shared_ptr<QueuePair>& pair() const noexcept { return pair_; }
  uint32_t room() const noexcept { return std::min(pair_->slots() - used_, *credits_); }
  uint32_t next_sequence() const noexcept { return sequence_; }
  // Posts a chain of `count` requests, at most room(), the last one signalled. All carry next_sequence() in their ids.
  // Returns how many were taken. If the library is out of memory, these are fewer than `count` and exclude the
  // signalled one, and the caller posts the rest later. `sent` is the meaning of the last one's completion.
  Result<uint32_t> post(abi::ibv_send_wr* first, uint32_t count, Sent sent);
  // Records that the post of this sequence and all before it have completed. Returns the meaning of that post, or
  // nothing if there is no such post.
  std::optional<Sent> completed(uint32_t sequence);
  bool idle() const noexcept { return posted_.empty(); }
  // Returns the posts that have not completed. Call it once the queue pair is destroyed.
  std::deque<Sent> give_up();

 private:
  std::shared_ptr<QueuePair> pair_;
  Credits* credits_;
  uint32_t used_ = 0;         // slots posted and not known to be free again
  uint32_t unsignalled_ = 0;  // slots of `used_` that the next signalled post will free
  // Starts shortly before the wrap-around, so that it wraps on every link that is used, and not once in years.
  uint32_t sequence_ = WorkRequestId::kSequenceMask - 1;
  std::deque<Sent> posted_;
};

}  // namespace kvc::verbs
