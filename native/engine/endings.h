// Endings: what has to be looked at because it may be over, and the one event that each thing ends with.
//
// Every method runs on the worker thread. What happens to streams only puts them on a list; settle() ends them and calls
// callbacks, at one place of the worker's turn.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/counter_sets.h"
#include "engine/event_queue.h"
#include "engine/registry.h"
#include "engine/stats.h"
#include "engine/transfer.h"

namespace kvc {

class Endings {
 public:
  Endings(Registry<Transfer>& transfers, const CounterSets& counters, EventQueue& events, Stats& stats)
      : transfers_(transfers), counters_(counters), events_(events), stats_(stats) {}

  // The stream may be over.
  void touch(Stream& stream) {
    if (stream.ended || std::exchange(stream.touched, true)) return;
    touched_.push_back(&stream);
  }
  // The stream's first error stays.
  static void record(Stream& stream, Error error);
  void fail(Stream& stream, Error error) {
    record(stream, std::move(error));
    touch(stream);
  }
  // A set whose counters have all reached their targets.
  void fired(CounterSets::Fired set) { fired_.push_back(std::move(set)); }

  // Calls `look(Stream&)` for each that was touched, which may touch others, and tells of counters; true if there was any.
  template <typename Look>
  bool settle(Look&& look) {
    bool any = false;
    while (!touched_.empty() || !fired_.empty()) {
      any = true;
      for (Stream* const stream : std::exchange(touched_, {})) {
        stream->touched = false;
        if (!stream->ended) look(*stream);
      }
      for (CounterSets::Fired& set : std::exchange(fired_, {})) tell(set);
    }
    return any;
  }

  // The transfer is over: its final event.
  void end(Transfer& transfer);
  // Calls it, whatever it throws.
  void call(const EventCallback& callback, const Event& event) noexcept;
  EventQueue& events() noexcept { return events_; }

  // Keeps what was erased from a registry until the commands that may mean it are carried out (Registry::peek): those
  // that have been submitted by now.
  void retire(std::shared_ptr<const void> erased) { retired_.push_back(std::move(erased)); }
  size_t retired() const { return retired_.size(); }
  // Lets go of the oldest `count`.
  void release(size_t count);

 private:
  void tell(CounterSets::Fired& set);

  Registry<Transfer>& transfers_;
  const CounterSets& counters_;
  EventQueue& events_;
  Stats& stats_;

  std::vector<Stream*> touched_;  // a stream lives until it has ended, and for as long as it may stand here
  std::vector<CounterSets::Fired> fired_;
  std::vector<std::shared_ptr<const void>> retired_;
};

}  // namespace kvc
