// Endings: the streams that may have ended, and the one event that reports each end.
//
// Every method runs on the transfer thread. Other units only put streams on a list. settle() ends them and calls
// callbacks, at one point of the turn.
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

  // Marks a stream that may have ended.
  void touch(Stream& stream) {
    if (stream.ended || std::exchange(stream.touched, true)) return;
    touched_.push_back(&stream);
  }
  // Records an error of the stream. Its first error stays.
  static void record(Stream& stream, Error error);
  void fail(Stream& stream, Error error) {
    record(stream, std::move(error));
    touch(stream);
  }
  // Records a set whose counters have all reached their targets.
  void fired(CounterSets::Fired set) { fired_.push_back(std::move(set)); }

  // Calls `look(Stream&)` for each marked stream, which may mark others, and reports fired counter sets. Returns true
  // if there was any.
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

  // Ends the transfer and reports its final event.
  void end(Transfer& transfer);
  // Calls the callback and catches all exceptions.
  void call(const EventCallback& callback, const Event& event) noexcept;
  EventQueue& events() noexcept { return events_; }

  // Keeps an object that was erased from a registry until all commands submitted by now are carried out. Such commands
  // may refer to it (Registry::peek).
  void retire(std::shared_ptr<const void> erased) { retired_.push_back(std::move(erased)); }
  size_t retired() const { return retired_.size(); }
  // Releases the oldest `count` objects.
  void release(size_t count);

 private:
  void tell(CounterSets::Fired& set);

  Registry<Transfer>& transfers_;
  const CounterSets& counters_;
  EventQueue& events_;
  Stats& stats_;

  std::vector<Stream*> touched_;  // a stream lives until it has ended and left this list
  std::vector<CounterSets::Fired> fired_;
  std::vector<std::shared_ptr<const void>> retired_;
};

}  // namespace kvc
