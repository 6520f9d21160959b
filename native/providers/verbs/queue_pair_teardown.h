// QueuePairTeardown: the end of one queue pair, so that nobody else loses by it.
//
// All queue pairs share their receives. When mlx5 destroys one, it takes that one's entries out of the completion queue
// and the receives that they stand for into its own free list (__mlx5_cq_clean): which slots those were we would never
// hear, and once all have gone that way no message of any peer finds one. So a queue pair is
//   stopped     put into ERR, on the control thread: nothing lands over it any more;
//   flushed     IBV_EVENT_QP_LAST_WQE_REACHED says that each receive that it had begun to fill has its entry in the
//               completion queue (InfiniBand's o11-5.2.5);
//   drained     what was in the queue then has been taken: all that has landed is counted, all receives are back;
//   destroyed   on the control thread, which waits until events about it are acknowledged;
//   cleared     once more what was in the queue then: rxe takes nothing out, and its entries must neither be taken for
//               those of a later queue pair of the same number, nor be in the place of something else's.
// mlx5 raises the event for every queue pair that goes to ERR, rxe only since 2023 (Linux 6.1 does not), and others may
// never: so flushing is bounded in time.
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

// One thread: the domain's.
class QueuePairTeardown {
 public:
  explicit QueuePairTeardown(std::shared_ptr<QueuePair> pair) : pair_(std::move(pair)) {}

  // The event has come. That may be before the end: a queue pair goes to ERR by itself when something fails.
  void note_last_receive() noexcept { flushed_ = true; }

  // Nothing is posted on it from now on.
  void begin(ControlQueue& control);
  // True if it came any further. Not before begin().
  bool step(ControlQueue& control, const Completions& completions, Clock::time_point now,
            std::chrono::milliseconds flush_timeout);

  bool begun() const noexcept { return stage_ != Stage::kNone; }
  bool over() const noexcept { return stage_ == Stage::kOver; }
  // When step() is to be called although nothing happens.
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
