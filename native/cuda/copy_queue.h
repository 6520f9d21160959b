// CopyQueue: the copies of one domain that its GPU has, and what each of them is for.
//
// It has two halves, like its domain. The connector's is a DomainGpu, which opens the GPU when the first memory of a GPU
// is registered; the domain's is the CopyQueue, which gets what the other has opened with that registration.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "base/error.h"
#include "cuda/copier.h"

namespace kvc::cuda {

// The GPU that one domain serves: that of the first GPU memory registered with it. Memory thread.
class DomainGpu {
 public:
  // `copy_blocks`: how many of the GPU's SMs a copy may occupy.
  explicit DomainGpu(uint32_t copy_blocks) : copy_blocks_(copy_blocks) {}

  // The Copier of the GPU `device`, opened if this is the first. kInvalidArgument: it is another GPU than the first.
  // Blocks.
  Result<std::shared_ptr<Copier>> adopt(int device);
  // Null before.
  const std::shared_ptr<Context>& context() const noexcept { return context_; }

 private:
  const uint32_t copy_blocks_;
  std::shared_ptr<Context> context_;
  std::shared_ptr<Copier> copier_;  // its end, which waits for copies, comes here or in a task: where it may block
};

// One thread; nothing here blocks. Each launch of the Copier has flights: whatever the domain has to end when the GPU has
// finished that launch.
template <typename Flight>
class CopyQueue {
 public:
  // What DomainGpu::adopt() returned; the same each time.
  void open(const std::shared_ptr<Copier>& copier) { copier_ = copier; }
  // Null before open().
  const std::shared_ptr<Copier>& copier() const noexcept { return copier_; }

  // There is room for a launch: Copier::begin(), add(), and then launch() here.
  bool can_begin() const noexcept { return copier_ != nullptr && !dead_ && copier_->can_begin(); }
  // Hands over what was added, and takes what it is for: one flight at least, though there may be nothing to copy.
  void launch(std::span<Flight> flights) {
    const Status launched = copier_->launch();
    if (!launched) die(launched.error());
    for (Flight& flight : flights) entries_.push_back({copier_->launched(), !launched, std::move(flight)});
  }

  // Ends the launches that the GPU has finished: calls `end(Flight&, const Error* failed)` for their flights, in the order
  // in which they came. `failed`: the GPU has not made the copy, or broke down in it. True if there was one.
  template <typename End>
  bool settle(End&& end) {
    if (entries_.empty()) return false;
    if (dead_ || ++turns_ % kTurnsPerCheck == 0) check_health();
    bool any = false;
    for (; !entries_.empty(); any = true) {
      const bool finished = copier_->finished() >= entries_.front().launch;
      if (!finished && !gone_) break;
      Entry entry = std::move(entries_.front());
      entries_.pop_front();
      end(entry.flight, finished && !entry.failed ? nullptr : &*dead_);
    }
    return any;
  }
  bool idle() const noexcept { return entries_.empty(); }
  // For who has to wait for copies that are launched, or gathered for the next launch: the number of that one, and
  // whether all up to it have ended.
  uint64_t next_launch() const noexcept { return copier_ != nullptr ? copier_->launched() + 1 : 0; }
  bool settled(uint64_t launch) const noexcept { return entries_.empty() || entries_.front().launch > launch; }

  // The GPU's error, after which no launch is possible any more; null: it is well.
  const Error* dead() const noexcept { return dead_ ? &*dead_ : nullptr; }

 private:
  // How often the GPU is asked for errors while copies are under way: 1 us, and never needed in a life without one.
  static constexpr uint32_t kTurnsPerCheck = 1024;

  struct Entry {
    uint64_t launch;  // the Copier's; all up to it must have ended
    bool failed;      // and it is not among them: the driver did not take it
    Flight flight;
  };

  void die(const Error& error) {
    if (!dead_) dead_ = error;
  }
  void check_health() {
    const Status healthy = copier_->health();
    if (healthy) return;
    die(healthy.error());
    gone_ = true;
  }

  std::shared_ptr<Copier> copier_;
  std::deque<Entry> entries_;
  std::optional<Error> dead_;
  bool gone_ = false;  // nothing of this process runs on the GPU any more
  uint32_t turns_ = 0;
};

}  // namespace kvc::cuda
