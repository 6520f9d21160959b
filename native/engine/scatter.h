// Scatter: writes to several peers that are checked once and submitted any number of times. Each submission has its own
// lengths and offsets and ends in one event.
//
// A submission takes a run of the scatter, fills it in and hands it to the transfer thread. The run is free again when
// its event is reported. A submission therefore allocates nothing if as many runs exist as are in flight at a time.
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

// One submission. It belongs to the submitting thread until it is handed over, then to the transfer thread until it is
// free again.
class ScatterRun {
 public:
  explicit ScatterRun(Scatter& of);
  // Returns the run to which a stream of kind kScatterPart belongs.
  static ScatterRun& of(Stream& part) { return static_cast<Part&>(part).run; }

  // The transfer id of this submission; 0 if the run is free. Any thread.
  TransferId id() const noexcept { return id_.load(std::memory_order_acquire); }

  // --- The submitting thread.

  // Fills in the lengths and offsets. Slice i follows updates[i]; without bytes it is an immediate alone, or nothing if
  // it has no immediate. The run keeps its scatter alive from now on.
  void fill(std::span<const ScatterUpdate> updates);
  // Ends a run that was handed over and will never start: no event follows, and the scatter is released. Called after
  // the transfer thread has ended.
  void abandon();

  // --- The transfer thread.

  void start(Poster& poster, Endings& endings);
  void cancel(Poster& poster, Endings& endings);
  // Ends a part of this run that has nothing in flight. The last part reports the event.
  void end(Stream& part, Endings& endings);

 private:
  friend class Scatter;

  struct Part : Stream {
    Part(ScatterRun& of, Peer& to) : Stream(Kind::kScatterPart, to, &of.progress_), run(of) {}
    ScatterRun& run;
  };

  Scatter& scatter_;
  std::shared_ptr<Scatter> keep_;  // set while the run is in use
  std::atomic<TransferId> id_{0};
  std::deque<Part> parts_;            // by member
  std::vector<RequestRef> requests_;  // by slice; null: this slice never writes or counts
  // By slice. The transfer thread copies them into the requests. The requests thus stay with its core, and only this
  // vector moves between cores.
  std::vector<ScatterUpdate> updates_;
  Progress progress_;
  size_t parts_left_ = 0;
  bool cancelled_ = false;
  std::vector<PeerFailure> failures_;
  bool quiesced_ = true;
};

class Scatter : public std::enable_shared_from_this<Scatter> {
 public:
  // What one slice may write to a member. A null `target`: the peer was fenced or disconnected.
  struct Slice {
    std::shared_ptr<LocalRegion> source;
    std::shared_ptr<const RemoteRegion> target;
    uint32_t member = 0;
    uint64_t source_offset = 0;
    uint64_t target_offset = 0;
    uint64_t bytes = 0;
    std::optional<uint32_t> immediate;
  };

  // `slices` are sorted by member. `callback` receives each run's event; empty: the event queue does. `on_end` is
  // called when the scatter was released and no run is in flight, before the last run's event is visible.
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

  // Returns no value, or the error if `updates` exceed the checked ranges.
  std::optional<Error> check(std::span<const ScatterUpdate> updates) const;
  // Takes a free run and gives it `id`. Null: the scatter was released, or kMaxRuns are in flight.
  ScatterRun* take(TransferId id);
  // The run with this id; null if it has ended or never existed.
  ScatterRun* find(TransferId id) const;
  // Ends the user's right to take runs. Returns false if the scatter was released before.
  bool release();
  bool released() const;

 private:
  friend class ScatterRun;

  // Most runs in flight at a time. A round trip of 20 us covers ten submissions of 2 us.
  static constexpr size_t kMaxRuns = 16;

  // Ends one use of the scatter (see users_).
  void leave();

  const ScatterId id_;
  const std::vector<std::shared_ptr<Peer>> members_;
  const std::vector<Slice> slices_;
  const EventCallback callback_;
  const std::function<void()> on_end_;
  std::atomic<uint32_t> users_{1};  // uses: its user, until release(), and each run in flight
  mutable std::mutex mutex_;
  bool released_ = false;        // guarded by mutex_
  std::deque<ScatterRun> runs_;  // guarded by mutex_; runs never move
};

}  // namespace kvc
