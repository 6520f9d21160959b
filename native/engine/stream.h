// Stream: requests to one peer that are posted in order and end together. Used on the transfer thread.
//
// A transfer is a stream. Other streams are a member's part of a scatter, and a recovery after a broken link. The kind
// of a stream determines what happens at its end (TransferScheduler).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/error.h"
#include "engine/request.h"

namespace kvc {

struct Peer;

// Written by the transfer thread, read by any thread. Statistics only: no order between the fields is promised.
struct Progress {
  std::atomic<uint64_t> pages_posted{0};
  std::atomic<uint64_t> bytes_posted{0};
  std::atomic<uint64_t> pages_done{0};
  std::atomic<uint64_t> bytes_done{0};
};

struct Stream {
  enum class Kind : uint8_t { kTransfer, kScatterPart, kRecovery };

  // `peer` must outlive the stream. `progress` is null for a recovery, whose pages were counted when they were posted
  // first.
  Stream(Kind of_kind, Peer& to, Progress* of) : kind(of_kind), peer(&to), progress(of) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const Kind kind;
  bool sealed = false;     // no more requests follow
  bool cancelled = false;  // nothing more of it is to be posted
  bool ended = false;      // its end was reported: later events are dropped
  bool runnable = false;   // in the queue of its peer
  bool touched = false;    // in the list of streams to look at
  bool quiesced = true;    // false: writes may still land at the peer after its end
  uint32_t armed = 0;      // plans with requests whose signal value has not been reached
  uint32_t batches_in_flight = 0;
  Peer* const peer;
  Progress* const progress;
  RequestQueue ready;          // requests to post now, in order
  ListHook<Stream> hook{};     // links of the peer's queue
  std::optional<Error> error;  // the first error

  // True if nothing more of it is to be posted.
  bool stopping() const { return cancelled || error.has_value(); }
  // True if all requests that were added and released by their signal have completed.
  bool idle() const { return ready.empty() && batches_in_flight == 0; }
  bool may_end() const { return batches_in_flight == 0 && (stopping() || (sealed && ready.empty() && armed == 0)); }
};

}  // namespace kvc
