// CounterSets: the receiver's counters in groups. Each expect() leads to one event "all targets reached".
//
// Counts only grow, so targets are cumulative, and nothing has to record when the last target was passed. Any thread
// may call any method. The lock is taken only when a counter reaches its target, so counting itself is lock-free.
// Callbacks are never called here: the transfer thread asks for the fired sets and calls them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/imm_counter.h"
#include "engine/transfer_engine.h"
#include "lane/completion_word.h"
#include "lane/control_queue.h"

namespace kvc {

class CounterSets {
 public:
  // A set whose counters have all reached their targets. It is reported once for each expect().
  struct Fired {
    CounterSetId id = 0;
    EventCallback callback;
    ControlOwned<CompletionWord> word;  // null: no word
    uint64_t value = 0;                 // the new value of `word`
    std::optional<Error> error{};       // why the set's mirror has ended
  };

  // Allocates a set of `n` counters. `raisers`: the peers whose immediates count. Empty: all connected peers.
  Result<CounterSet> allocate(uint32_t n, std::vector<PeerId> raisers);
  // Sets new targets. Returns the set if its counters have reached them already. `control` is where the reference to
  // `word` ends. It must outlive the sets, or clear().
  Result<std::optional<Fired>> expect(CounterSetId id, const std::vector<uint64_t>& targets, EventCallback callback,
                                      std::shared_ptr<CompletionWord> word, uint64_t value, ControlQueue& control);
  // Stores the present counts into `words`, one for each counter, and each new count from now on. `control` as in
  // expect(). Stores happen under the lock of this object, so each word receives rising values, and none after
  // release() or clear().
  Status mirror(CounterSetId id, std::vector<std::shared_ptr<CompletionWord>> words, ControlQueue& control);
  Result<std::vector<uint64_t>> values(CounterSetId id) const;
  // Returns the set's immediates, for a reader of the counts. From now on acted_on() is true for all of them.
  Result<std::vector<uint32_t>> read(CounterSetId id);
  // Forgets all sets and their words, when no set is used any more. Counters stay readable.
  void clear();
  // Releases the set. The caller must keep the returned object, if any, until every add() that runs now has ended.
  Result<std::shared_ptr<const void>> release(CounterSetId id);
  bool exists(CounterSetId id) const;
  // True if the immediate's counter is allocated and not released.
  bool live(uint32_t immediate) const { return table_.value(immediate).has_value(); }
  // True if pages counted by this counter may have been used and hold other bytes now: its set has reached a target, or
  // its counts are read. Takes the lock.
  bool acted_on(uint32_t immediate) const;
  // The count of a live counter; 0 if it was released. Lock-free.
  uint64_t value(uint32_t immediate) const noexcept { return table_.value(immediate).value_or(0); }

  // Counts an immediate of `peer` that landed, and returns the outcome. Called for every page: the work after a reached
  // target is in reached(), so that this call returns in two registers.
  ImmCounterTable::Added add(uint32_t immediate, PeerId peer) noexcept { return table_.add(immediate, peer); }
  // To call after add() reported that a counter of this set reached its target. Returns the set if this was its last
  // counter. A mirrored set is returned only if its mirror has failed.
  std::optional<Fired> reached(CounterSetId id);

  uint32_t allocated() const noexcept { return table_.allocated(); }

 private:
  struct Set {
    std::vector<uint32_t> immediates;
    std::shared_ptr<const std::vector<PeerId>> raisers;  // sorted
    size_t remaining = 0;                                // counters below their target
    EventCallback callback;
    ControlOwned<CompletionWord> word;  // kept until the next expect() or the end of the set
    uint64_t value = 0;
    bool acted_on = false;
    std::vector<ControlOwned<CompletionWord>> mirror;  // by counter; empty: not mirrored, or the mirror has failed
    std::vector<std::optional<uint64_t>> mirrored;     // by counter: the value of its word; empty: never mirrored

    Fired fire(CounterSetId id) {
      acted_on = true;
      return {id, std::move(callback), word, value};
    }
  };

  // Stores the counts that have risen since the last call. The next add() to any of the counters is reported.
  Status store_counts(Set& set);

  ImmCounterTable table_;
  mutable std::mutex mutex_;
  CounterSetId next_id_ = 1;
  std::unordered_map<CounterSetId, Set> sets_;
};

}  // namespace kvc
