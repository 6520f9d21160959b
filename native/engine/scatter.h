// Scatter: writes to several peers that are checked once, submitted as often as one likes with other lengths and offsets,
// and end in one event each time.
//
// Whoever submits takes a run of the scatter, fills it in, and hands it to the worker; the run is free again when its event
// is told. So a submission allocates nothing once as many runs exist as are in flight at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "engine/endings.h"
#include "engine/memory_region.h"
#include "engine/peer.h"
#include "engine/poster.h"
#include "engine/stream.h"
#include "engine/transfer_engine.h"

namespace kvc {

class Scatter;

// One submission. Its submitter's until it is handed to the worker, then the worker's until it is free again.
class ScatterRun {
 public:
  explicit ScatterRun(Scatter& of);
  // The run that a stream of kind kScatterPart belongs to.
  static ScatterRun& of(Stream& part) { return static_cast<Part&>(part).run; }

  // Which transfer this is for its user; 0: none, the run is free. Any thread.
  TransferId id() const noexcept { return id_.load(std::memory_order_acquire); }

  // --- Its submitter.

  // Slice i goes as updates[i] says, or is an immediate alone, or nothing (no bytes, no immediate). Then it is handed over,
  // and keeps its scatter.
  void fill(std::span<const ScatterUpdate> updates);
  // Ends a run that was handed over and is never started: no event follows, and the scatter is released. Called once the
  // worker has ended.
  void abandon();

  // --- The worker.

  void start(Poster& poster, Endings& endings);
  void cancel(Poster& poster, Endings& endings);
  // The part, one of this run's, has nothing more in flight. The last one tells the event.
  void end(Stream& part, Endings& endings);

 private:
  friend class Scatter;

  struct Part : Stream {
    Part(ScatterRun& of, Peer& to) : Stream(Kind::kScatterPart, to, &of.progress_), run(of) {}
    ScatterRun& run;
  };

  Scatter& scatter_;
  std::shared_ptr<Scatter> keep_;  // while it runs
  std::atomic<TransferId> id_{0};
  std::deque<Part> parts_;            // by member
  std::vector<RequestRef> requests_;  // by slice; none: this slice never writes nor counts
  // By slice. The worker puts them into the requests: those stay with its core, and what changes cores is this alone.
  std::vector<ScatterUpdate> updates_;
  Progress progress_;
  size_t parts_left_ = 0;
  bool cancelled_ = false;
  std::vector<PeerFailure> failures_;
  bool quiesced_ = true;
};

class Scatter : public std::enable_shared_from_this<Scatter> {
 public:
  // What may go to a member in one slice. `target` null: the peer was fenced, or has left.
  struct Slice {
    std::shared_ptr<LocalRegion> source;
    std::shared_ptr<const RemoteRegion> target;
    uint32_t member = 0;
    uint64_t source_offset = 0;
    uint64_t target_offset = 0;
    uint64_t bytes = 0;
    std::optional<uint32_t> immediate;
  };

  // `slices` by rising member. `callback`: gets each run's event; empty: the event queue does. `on_end`: called when it is
  // released and no run is in flight, before the last one's event can be seen.
  Scatter(ScatterId id, std::vector<std::shared_ptr<Peer>> members, std::vector<Slice> slices, EventCallback callback,
          std::function<void()> on_end)
      : id_(id),
        members_(std::move(members)),
        slices_(std::move(slices)),
        callback_(std::move(callback)),
        on_end_(std::move(on_end)) {}

  ScatterId id() const noexcept { return id_; }
  bool has_callback() const noexcept { return static_cast<bool>(callback_); }

  // --- Any thread.

  // nullopt, or why `updates` lie outside of what was checked.
  std::optional<Error> check(std::span<const ScatterUpdate> updates) const;
  // A free run, known as `id` from now on. Null: it was released, or kMaxRuns are in flight.
  ScatterRun* take(TransferId id);
  // The run of this id; null: it has ended, or there never was one.
  ScatterRun* find(TransferId id) const;
  // Its user takes no more runs. False: it was released before.
  bool release();
  bool released() const;

 private:
  friend class ScatterRun;

  // In flight at a time: a round trip of 20 us holds ten submissions of 2 us.
  static constexpr size_t kMaxRuns = 16;

  // One who needs it to be found does so no more.
  void leave();

  const ScatterId id_;
  const std::vector<std::shared_ptr<Peer>> members_;
  const std::vector<Slice> slices_;
  const EventCallback callback_;
  const std::function<void()> on_end_;
  std::atomic<uint32_t> users_{1};  // who need it to be found: its user, until release(), and each run in flight
  mutable std::mutex mutex_;
  bool released_ = false;        // guarded by mutex_
  std::deque<ScatterRun> runs_;  // guarded by mutex_; they stay where they are
};

}  // namespace kvc
