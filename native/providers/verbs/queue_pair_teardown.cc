#include "providers/verbs/queue_pair_teardown.h"

namespace kvc::verbs {

void QueuePairTeardown::begin(ControlQueue& control) {
  if (begun()) return;
  stage_ = Stage::kStopping;
  control.run([pair = pair_] { pair->stop(); });
}

bool QueuePairTeardown::step(ControlQueue& control, const Completions& completions, Clock::time_point now,
                             std::chrono::milliseconds flush_timeout) {
  switch (stage_) {
    case Stage::kStopping:
      if (!pair_->stopped()) return false;
      deadline_ = now + flush_timeout;
      stage_ = Stage::kFlushing;
      return true;
    case Stage::kFlushing:
      if (!flushed_ && now < deadline_) return false;
      mark_ = completions.mark();
      stage_ = Stage::kDraining;
      return true;
    case Stage::kDraining:
      if (!completions.passed(mark_)) return false;
      control.run([pair = pair_] { pair->destroy(); });
      stage_ = Stage::kDestroying;
      return true;
    case Stage::kDestroying:
      if (!pair_->destroyed()) return false;
      mark_ = completions.mark();
      stage_ = Stage::kClearing;
      return true;
    case Stage::kClearing:
      if (!completions.passed(mark_)) return false;
      stage_ = Stage::kOver;
      return true;
    case Stage::kNone:
    case Stage::kOver:
      break;
  }
  return false;
}

}  // namespace kvc::verbs
