// QueuePairTeardown: the end of one queue pair, without loss for other queue pairs.
//
// All queue pairs share their receives. When mlx5 destroys a queue pair, it removes that pair's entries from the
// completion queue. It puts their receives into its own free list (__mlx5_cq_clean). This provider would never learn
// which slots those were. Once all slots are lost that way, no peer's message finds a receive. So a queue pair ends in
// these steps:
// - Stopped: it is put into ERR, on the control thread. Nothing lands over it any more.
// - Flushed: IBV_EVENT_QP_LAST_WQE_REACHED reports that each receive that it had begun to fill has its entry in the
//   completion queue (InfiniBand's o11-5.2.5).
// - Drained: the entries in the queue at that time are taken. All that has landed is counted, and all receives are
//   back.
// - Destroyed: on the control thread, which waits until its events are acknowledged.
// - Cleared: the entries in the queue are taken once more. rxe removes none. Its entries must neither be mistaken for
//   entries of a later queue pair with the same number, nor occupy the places of others.
// mlx5 raises the event for every queue pair that goes to ERR. rxe does so only since 2023 (Linux 6.1 does not), and
// other devices may never. So flushing is bounded in time.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/timer_fd.h"
#include "lane/control_queue.h"
#include "providers/verbs/completions.h"
#include "providers/verbs/queue_pair.h"

namespace kvc::verbs {

using Clock = TimerFd::Clock;

// Used on the domain's thread only.
class QueuePairTeardown {
 public:
  explicit QueuePairTeardown(std::shared_ptr<QueuePair> pair) : pair_(std::move(pair)) {}

  // Records the event. It may come before begin(): a queue pair goes to ERR by itself when something fails.
  void note_last_receive() noexcept { flushed_ = true; }

  // Begins the end. No request may be posted on the queue pair from now on.
  void begin(ControlQueue& control);
  // Continues the end. Returns true if there was progress. Call it after begin().
  bool step(ControlQueue& control, const Completions& completions, Clock::time_point now,
            std::chrono::milliseconds flush_timeout);

  bool begun() const noexcept { return stage_ != Stage::kNone; }
  bool over() const noexcept { return stage_ == Stage::kOver; }
  // The time by which step() must be called even if nothing happens.
  std::optional<Clock::time_point> deadline() const noexcept {
    return stage_ == Stage::kFlushing ? std::optional(deadline_) : std::nullopt;
  }

 private:
  enum class Stage : uint8_t { kNone, kStopping, kFlushing, kDraining, kDestroying, kClearing, kOver };

  const std::shared_ptr<QueuePair> pair_;
  Stage stage_ = Stage::kNone;
  bool flushed_ = false;
  Clock::time_point deadline_;
  Completions::Mark mark_;
};

}  // namespace kvc::verbs
