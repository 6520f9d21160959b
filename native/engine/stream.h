// Stream: what is to be posted to one peer, one request after the other, and ends together. The worker's.
//
// A transfer is one; so is each member's part of a scatter, and the rewriting of what a broken link has left open. What
// becomes of a stream that has ended depends on its kind (TransferScheduler).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/error.h"
#include "engine/request.h"

namespace kvc {

struct Peer;

// Written by the worker, read by anyone. Statistics: no order between them is promised.
struct Progress {
  std::atomic<uint64_t> pages_posted{0};
  std::atomic<uint64_t> bytes_posted{0};
  std::atomic<uint64_t> pages_done{0};
  std::atomic<uint64_t> bytes_done{0};
};

struct Stream {
  enum class Kind : uint8_t { kTransfer, kScatterPart, kRecovery };

  // `peer` outlives the stream. `progress`: null for a recovery, whose pages were told of when they were posted first.
  Stream(Kind of_kind, Peer& to, Progress* of) : kind(of_kind), peer(&to), progress(of) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const Kind kind;
  bool sealed = false;     // no more requests follow
  bool cancelled = false;  // nothing more of it is to be posted
  bool ended = false;      // its end was told: what comes late is dropped
  bool runnable = false;   // in its peer's queue
  bool touched = false;    // in the list of streams to look at
  bool quiesced = true;    // nothing of it can land at the peer any more, once it has ended
  uint32_t armed = 0;      // plans with requests whose signal has not passed
  uint32_t batches_in_flight = 0;
  Peer* const peer;
  Progress* const progress;
  RequestQueue ready;          // to be posted now, in order
  ListHook<Stream> hook{};     // its peer's queue
  std::optional<Error> error;  // the first one

  // Nothing more of it is to be posted.
  bool stopping() const { return cancelled || error.has_value(); }
  // All that was added and whose signal has passed is completed.
  bool idle() const { return ready.empty() && batches_in_flight == 0; }
  bool may_end() const { return batches_in_flight == 0 && (stopping() || (sealed && ready.empty() && armed == 0)); }
};

}  // namespace kvc
