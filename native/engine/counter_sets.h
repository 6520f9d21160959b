// CounterSets: the receiver's counters in groups, each with one "all reached their targets" event for each time
// that targets are set. Counts only grow, so targets are cumulative, and nobody has to know when the last one was passed.
//
// Any thread may call anything here. The lock is taken only when a counter reaches its target, so counting itself stays
// lock-free. Callbacks are never called here: they belong to the worker, which asks for the fired sets.
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
  // A set whose counters have all reached their targets: it is reported once for each expect().
  struct Fired {
    CounterSetId id = 0;
    EventCallback callback;
    ControlOwned<CompletionWord> word;  // null: none
    uint64_t value = 0;                 // what it becomes
  };

  // `raisers`: whose immediates count; empty: anybody's who is connected.
  Result<CounterSet> allocate(uint32_t n, std::vector<PeerId> raisers);
  // The set, if its counters are there already. `control`: where the share in `word` ends; it outlives the sets, or clear().
  Result<std::optional<Fired>> expect(CounterSetId id, const std::vector<uint64_t>& targets, EventCallback callback,
                                      std::shared_ptr<CompletionWord> word, uint64_t value, ControlQueue& control);
  Result<std::vector<uint64_t>> values(CounterSetId id) const;
  // The set's immediates, for a reader of their counts: acted_on() holds for all of them from now on.
  Result<std::vector<uint32_t>> read(CounterSetId id);
  // Forgets all sets, and with them their words: no set is used any more. Counters stay readable.
  void clear();
  // The answer, if any, has to live until an add() that is under way has ended.
  Result<std::shared_ptr<const void>> release(CounterSetId id);
  bool exists(CounterSetId id) const;
  // The immediate's counter is allocated and not released.
  bool live(uint32_t immediate) const { return table_.value(immediate).has_value(); }
  // Pages that the immediate's counter has counted may have been used, and hold other bytes by now: a target of its set was
  // reached, or its counts are read. Takes the lock.
  bool acted_on(uint32_t immediate) const;
  // Of a live counter; 0 for one that was released. Lock-free.
  uint64_t value(uint32_t immediate) const noexcept { return table_.value(immediate).value_or(0); }

  // Counts an immediate of `peer` that landed, and says what became of it. Once for each page: what a reached target entails
  // is the caller's next call, so that this one returns in two registers.
  ImmCounterTable::Added add(uint32_t immediate, PeerId peer) noexcept { return table_.add(immediate, peer); }
  // add() said that a counter of this set has reached its target: the set, if it was the last one.
  std::optional<Fired> reached(CounterSetId id);

  uint32_t allocated() const noexcept { return table_.allocated(); }

 private:
  struct Set {
    std::vector<uint32_t> immediates;
    std::shared_ptr<const std::vector<PeerId>> raisers;  // sorted
    size_t remaining = 0;                                // counters below their target
    EventCallback callback;
    ControlOwned<CompletionWord> word;  // until the next expect(), or the set's end
    uint64_t value = 0;
    bool acted_on = false;

    Fired fire(CounterSetId id) {
      acted_on = true;
      return {id, std::move(callback), word, value};
    }
  };

  ImmCounterTable table_;
  mutable std::mutex mutex_;
  CounterSetId next_id_ = 1;
  std::unordered_map<CounterSetId, Set> sets_;
};

}  // namespace kvc
