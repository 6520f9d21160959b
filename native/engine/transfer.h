// Transfer: a growing set of writes to one peer, with exactly one final event.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/peer.h"
#include "engine/request.h"
#include "engine/transfer_engine.h"

namespace kvc {

// On cache lines apart from its reference count: see memory_region.h.
class alignas(64) Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  // What it is: a message counts against what may wait for a peer that does not read.
  enum class Kind : uint8_t { kWrites, kMessage };

  Transfer(TransferId transfer_id, std::shared_ptr<Peer> to, EventCallback on_end, Kind of_kind = Kind::kWrites)
      : id(transfer_id), peer(std::move(to)), callback(std::move(on_end)), kind(of_kind) {
    // Sequentially consistent, beside the look at the peer's state: see Departures.
    peer->transfers.fetch_add(1, std::memory_order_seq_cst);
    if (kind == Kind::kMessage) peer->messages.fetch_add(1, std::memory_order_relaxed);
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer() {
    if (kind == Kind::kMessage) peer->messages.fetch_sub(1, std::memory_order_relaxed);
    peer->transfers.fetch_sub(1, std::memory_order_seq_cst);
  }

  const TransferId id;
  const std::shared_ptr<Peer> peer;
  const EventCallback callback;
  const Kind kind;

  // Written by the worker, read by anyone. Statistics: no order between them is promised.
  struct Progress {
    std::atomic<uint64_t> pages_posted{0};
    std::atomic<uint64_t> bytes_posted{0};
    std::atomic<uint64_t> pages_done{0};
    std::atomic<uint64_t> bytes_done{0};
  };
  alignas(64) Progress progress;

  // --- The worker's from here on.

  std::deque<std::shared_ptr<Request>> ready;  // to be posted now, in order
  uint32_t armed_plans = 0;                    // plans with layers whose signal has not passed
  uint32_t batches_in_flight = 0;
  bool sealed = false;
  bool cancelled = false;
  bool ended = false;     // its final event was built: commands that come late are dropped
  bool runnable = false;  // in its peer's queue
  bool touched = false;   // in the scheduler's list of transfers to look at
  bool quiesced = true;
  std::optional<Error> error;  // the first one
  // Of a recovery, which no user knows: the scheduler's entries in flight that it writes again. They end as it ends.
  std::vector<uint32_t> recovers;

  // Nothing more of it is to be posted.
  bool stopping() const { return cancelled || error.has_value(); }
  // All that was added and whose signal has passed is completed.
  bool idle() const { return ready.empty() && batches_in_flight == 0; }
};

}  // namespace kvc
