#include "engine/counter_sets.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kvc {

namespace {

Error no_such_set(std::string_view operation, CounterSetId id) {
  return Error{ErrorCode::kInvalidArgument,
               {},
               {},
               std::string(operation),
               "counter set " + std::to_string(id) + " does not exist: it was released or never allocated here"};
}

}  // namespace

Result<CounterSet> CounterSets::allocate(uint32_t n, std::vector<PeerId> raisers) {
  std::sort(raisers.begin(), raisers.end());
  Set set;
  set.raisers = std::make_shared<const std::vector<PeerId>>(std::move(raisers));
  const std::lock_guard lock(mutex_);
  const CounterSetId id = next_id_;
  if (!table_.allocate(n, id, *set.raisers, set.immediates)) {
    return Error{ErrorCode::kResources,
                 {},
                 {},
                 "alloc_counters",
                 std::to_string(n) + " counters requested, " +
                     std::to_string(ImmCounterTable::kSlots - table_.allocated()) +
                     " are free: release counter sets that are no longer needed"};
  }
  ++next_id_;
  CounterSet answer{id, set.immediates};
  sets_.emplace(id, std::move(set));
  return answer;
}

Result<std::optional<CounterSets::Fired>> CounterSets::expect(CounterSetId id, const std::vector<uint64_t>& targets,
                                                              EventCallback callback,
                                                              std::shared_ptr<CompletionWord> word, uint64_t value,
                                                              ControlQueue& control) {
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(id);
  if (found == sets_.end()) return no_such_set("expect", id);
  Set& set = found->second;
  if (set.remaining > 0) {
    return Error{ErrorCode::kInvalidArgument,
                 {},
                 {},
                 "expect",
                 "counter set " + std::to_string(id) +
                     " has not reached its current targets: wait for its event before you set new targets"};
  }
  if (targets.size() != set.immediates.size()) {
    return Error{ErrorCode::kInvalidArgument,
                 {},
                 {},
                 "expect",
                 std::to_string(targets.size()) + " targets for " + std::to_string(set.immediates.size()) +
                     " counters: give one target for each counter"};
  }
  for (const uint64_t target : targets) {
    if (target > ImmCounterTable::kMaxCount) {
      return Error{ErrorCode::kInvalidArgument,
                   {},
                   {},
                   "expect",
                   "target " + std::to_string(target) + " is too large: the limit is " +
                       std::to_string(ImmCounterTable::kMaxCount)};
    }
  }
  std::swap(set.callback, callback);
  if (set.word.get() != word.get()) set.word = ControlOwned(control, std::move(word));
  set.value = value;
  set.remaining = targets.size();
  for (size_t i = 0; i < targets.size(); ++i) {
    if (table_.expect(set.immediates[i], targets[i])) --set.remaining;
  }
  if (set.remaining > 0) return std::optional<Fired>{};
  return std::optional<Fired>{set.fire(id)};
}

Result<std::vector<uint64_t>> CounterSets::values(CounterSetId id) const {
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(id);
  if (found == sets_.end()) return no_such_set("counter_values", id);
  std::vector<uint64_t> values;
  values.reserve(found->second.immediates.size());
  for (const uint32_t immediate : found->second.immediates) values.push_back(value(immediate));
  return values;
}

Result<std::vector<uint32_t>> CounterSets::read(CounterSetId id) {
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(id);
  if (found == sets_.end()) return no_such_set("counter_reader", id);
  found->second.acted_on = true;
  return found->second.immediates;
}

Result<std::shared_ptr<const void>> CounterSets::release(CounterSetId id) {
  // Destroyed after the lock is released: the transfer thread takes the lock, and the callback belongs to the caller.
  decltype(sets_)::node_type ended;
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(id);
  if (found == sets_.end()) return no_such_set("release_counters", id);
  for (const uint32_t immediate : found->second.immediates) table_.release(immediate);
  std::shared_ptr<const void> raisers;
  if (found->second.raisers->size() > 1) raisers = std::move(found->second.raisers);  // one is in the counters
  ended = sets_.extract(found);
  return raisers;
}

void CounterSets::clear() {
  // Destroyed after the lock is released: the callbacks belong to their callers.
  std::unordered_map<CounterSetId, Set> ended;
  const std::lock_guard lock(mutex_);
  ended.swap(sets_);
}

bool CounterSets::exists(CounterSetId id) const {
  const std::lock_guard lock(mutex_);
  return sets_.contains(id);
}

bool CounterSets::acted_on(uint32_t immediate) const {
  const std::optional<uint64_t> owner = table_.owner(immediate);
  const std::lock_guard lock(mutex_);
  const auto found = owner ? sets_.find(*owner) : sets_.end();
  return found != sets_.end() && found->second.acted_on;
}

std::optional<CounterSets::Fired> CounterSets::reached(CounterSetId id) {
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(id);
  // The set was released after the count: no thread waits for it any more.
  if (found == sets_.end() || --found->second.remaining > 0) return std::nullopt;
  return found->second.fire(id);
}

}  // namespace kvc
