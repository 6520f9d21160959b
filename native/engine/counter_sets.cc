#include "engine/counter_sets.h"

#include <string>
#include <utility>

namespace kvc {

namespace {

Error no_such_set(std::string_view operation, CounterSetId id) {
  return Error{ErrorCode::kInvalidArgument,
               {},
               {},
               std::string(operation),
               "no counter set " + std::to_string(id) + ": never allocated here, or released"};
}

}  // namespace

Result<CounterSet> CounterSets::allocate(uint32_t n) {
  const std::lock_guard lock(mutex_);
  CounterSet set{next_id_, {}};
  if (!table_.allocate(n, set.id, set.immediates)) {
    return Error{ErrorCode::kResources,
                 {},
                 {},
                 "alloc_counters",
                 std::to_string(n) + " counters asked for, " +
                     std::to_string(ImmCounterTable::kSlots - table_.allocated()) +
                     " free: release sets that are no longer needed"};
  }
  ++next_id_;
  sets_.emplace(set.id, Set{set.immediates, false, 0, {}});
  return set;
}

Result<std::optional<CounterSets::Fired>> CounterSets::expect(CounterSetId id, const std::vector<uint64_t>& targets,
                                                              EventCallback callback) {
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(id);
  if (found == sets_.end()) return no_such_set("expect", id);
  Set& set = found->second;
  if (set.expected) {
    return Error{ErrorCode::kInvalidArgument,
                 {},
                 {},
                 "expect",
                 "counter set " + std::to_string(id) + " has its targets already"};
  }
  if (targets.size() != set.immediates.size()) {
    return Error{ErrorCode::kInvalidArgument,
                 {},
                 {},
                 "expect",
                 std::to_string(targets.size()) + " targets for " + std::to_string(set.immediates.size()) +
                     " counters: give one target a counter"};
  }
  for (const uint64_t target : targets) {
    if (target > ImmCounterTable::kMaxCount) {
      return Error{ErrorCode::kInvalidArgument, {}, {}, "expect", "target " + std::to_string(target) + " is too large"};
    }
  }
  set.expected = true;
  set.callback = std::move(callback);
  set.remaining = targets.size();
  for (size_t i = 0; i < targets.size(); ++i) {
    if (table_.expect(set.immediates[i], targets[i])) --set.remaining;
  }
  if (set.remaining > 0) return std::optional<Fired>{};
  return std::optional<Fired>{Fired{id, std::move(set.callback)}};
}

Result<std::vector<uint64_t>> CounterSets::values(CounterSetId id) const {
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(id);
  if (found == sets_.end()) return no_such_set("counter_values", id);
  std::vector<uint64_t> values;
  values.reserve(found->second.immediates.size());
  for (const uint32_t immediate : found->second.immediates) values.push_back(table_.value(immediate).value_or(0));
  return values;
}

Status CounterSets::release(CounterSetId id) {
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(id);
  if (found == sets_.end()) return no_such_set("release_counters", id);
  for (const uint32_t immediate : found->second.immediates) table_.release(immediate);
  sets_.erase(found);
  return {};
}

bool CounterSets::exists(CounterSetId id) const {
  const std::lock_guard lock(mutex_);
  return sets_.contains(id);
}

CounterSets::Added CounterSets::add(uint32_t immediate) {
  const ImmCounterTable::Added added = table_.add(immediate);
  if (!added.reached) return {added.stale, {}};
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(added.owner);
  // Released between the count and here: nobody waits for it any more.
  if (found == sets_.end() || --found->second.remaining > 0) return {};
  return {false, Fired{added.owner, std::move(found->second.callback)}};
}

}  // namespace kvc
