// CounterSets: the receiver's counters in groups, each with one "all reached their targets" event.
//
// Any thread may call anything here. The worker's add() takes the lock only when a counter reaches its target, so
// counting itself stays lock-free. Callbacks are never called here: they belong to the worker, which asks for the
// fired sets.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/imm_counter.h"
#include "engine/transfer_engine.h"

namespace kvc {

class CounterSets {
 public:
  // A set whose counters have all reached their targets: it is reported once, and stays until release().
  struct Fired {
    CounterSetId id = 0;
    EventCallback callback;
  };

  Result<CounterSet> allocate(uint32_t n);
  // The set, if its counters are there already.
  Result<std::optional<Fired>> expect(CounterSetId id, const std::vector<uint64_t>& targets, EventCallback callback);
  Result<std::vector<uint64_t>> values(CounterSetId id) const;
  Status release(CounterSetId id);
  bool exists(CounterSetId id) const;
  // The immediate's counter is allocated and not released.
  bool live(uint32_t immediate) const { return table_.value(immediate).has_value(); }

  // Counts an immediate that landed. `stale` and `fired` say what became of it.
  struct Added {
    bool stale = false;
    std::optional<Fired> fired;
  };
  Added add(uint32_t immediate);

  uint32_t allocated() const noexcept { return table_.allocated(); }

 private:
  struct Set {
    std::vector<uint32_t> immediates;
    bool expected = false;
    size_t remaining = 0;  // counters below their target, once expected
    EventCallback callback;
  };

  ImmCounterTable table_;
  mutable std::mutex mutex_;
  CounterSetId next_id_ = 1;
  std::unordered_map<CounterSetId, Set> sets_;
};

}  // namespace kvc
