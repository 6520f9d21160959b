// CopyQueue: the GPU copies of one domain, and the work that each copy completes.
//
// Like its domain, it has two halves. The connector has a DomainGpu, which opens the GPU when its first GPU memory is
// registered. The domain has the CopyQueue, which receives the opened Copier with that registration.
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

// The GPU of one domain: the GPU of the first GPU memory that was registered with it. Used on the memory thread.
class DomainGpu {
 public:
  // `copy_blocks`: number of the GPU's SMs that a copy may occupy.
  explicit DomainGpu(uint32_t copy_blocks) : copy_blocks_(copy_blocks) {}

  // Returns the Copier of the GPU `device`, and opens it in the first call. kInvalidArgument: an earlier call was for
  // another GPU. Blocks.
  Result<std::shared_ptr<Copier>> adopt(int device);
  // Null before the first adopt().
  const std::shared_ptr<Context>& context() const noexcept { return context_; }

 private:
  const uint32_t copy_blocks_;
  std::shared_ptr<Context> context_;
  std::shared_ptr<Copier> copier_;  // its destructor waits for copies, and runs here or in a task, where it may block
};

// One thread; no call blocks. Each launch of the Copier has flights: objects that the domain ends when the GPU has
// finished the launch.
template <typename Flight>
class CopyQueue {
 public:
  // Sets the Copier, which DomainGpu::adopt() returned. It is the same in every call.
  void open(const std::shared_ptr<Copier>& copier) { copier_ = copier; }
  // Null before open().
  const std::shared_ptr<Copier>& copier() const noexcept { return copier_; }

  // True if there is room for a launch: Copier::begin(), add(), and then launch() of this object.
  bool can_begin() const noexcept { return copier_ != nullptr && !dead_ && copier_->can_begin(); }
  // Launches the added pages for the given flights. At least one flight is needed, but pages may be missing.
  void launch(std::span<Flight> flights) {
    const Status launched = copier_->launch();
    if (!launched) die(launched.error());
    for (Flight& flight : flights) entries_.push_back({copier_->launched(), !launched, std::move(flight)});
  }

  // Ends the launches that the GPU has finished. Calls `end(Flight&, const Error* failed)` for their flights, in the
  // order of arrival. `failed`: the GPU did not make the copy, or failed during it. Returns true if there was one.
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
  // For callers that wait for copies, launched or gathered for the next launch. next_launch() is the number of that launch,
  // and settled() tells whether all launches up to a number have ended.
  uint64_t next_launch() const noexcept { return copier_ != nullptr ? copier_->launched() + 1 : 0; }
  bool settled(uint64_t launch) const noexcept { return entries_.empty() || entries_.front().launch > launch; }

  // The GPU's error, after which no launch is possible any more. Null: no error.
  const Error* dead() const noexcept { return dead_ ? &*dead_ : nullptr; }

 private:
  // Turns between checks of the GPU for errors while copies are in flight. A check takes 1 us and rarely finds an
  // error.
  static constexpr uint32_t kTurnsPerCheck = 1024;

  struct Entry {
    uint64_t launch;  // number of the Copier's launch; all launches up to it must have ended
    bool failed;      // true: the driver refused the launch itself
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
  bool gone_ = false;  // no work of this process runs on the GPU any more
  uint32_t turns_ = 0;
};

}  // namespace kvc::cuda
