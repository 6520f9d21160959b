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
  if (!set.mirrored.empty()) {
    return Error{ErrorCode::kInvalidArgument,
                 {},
                 {},
                 "expect",
                 "counter set " + std::to_string(id) + " is mirrored: poll its words instead of setting targets"};
  }
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

Status CounterSets::mirror(CounterSetId id, std::vector<std::shared_ptr<CompletionWord>> words, ControlQueue& control) {
  const auto refuse = [](std::string message) {
    return Error{ErrorCode::kInvalidArgument, {}, {}, "mirror_counters", std::move(message)};
  };
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(id);
  if (found == sets_.end()) return no_such_set("mirror_counters", id);
  Set& set = found->second;
  const std::string name = "counter set " + std::to_string(id);
  if (!set.mirrored.empty()) return refuse(name + " is mirrored already: release it and allocate another one");
  if (set.remaining > 0) return refuse(name + " has not reached its targets: mirror a set before you set targets");
  if (words.size() != set.immediates.size()) {
    return refuse(std::to_string(words.size()) + " words for " + std::to_string(set.immediates.size()) +
                  " counters: give one word for each counter");
  }
  if (std::find(words.begin(), words.end(), nullptr) != words.end()) {
    return refuse("a word is missing: give one word for each counter");
  }
  set.acted_on = true;
  for (std::shared_ptr<CompletionWord>& word : words) set.mirror.emplace_back(control, std::move(word));
  set.mirrored.assign(set.mirror.size(), std::nullopt);
  Status stored = store_counts(set);
  if (!stored) set.mirror.clear();
  return stored;
}

// A counter's target is always the next count. add() reports it by the same exchange of the target as for expect(), so a
// counter without a mirror costs nothing more.
Status CounterSets::store_counts(Set& set) {
  for (size_t i = 0; i < set.mirror.size(); ++i) {
    for (;;) {
      const uint64_t count = value(set.immediates[i]);
      if (set.mirrored[i] == count) break;
      if (Status stored = set.mirror[i]->store(count); !stored) return stored;
      set.mirrored[i] = count;
      if (!table_.expect(set.immediates[i], count + 1)) break;  // otherwise it has risen meanwhile
    }
  }
  return {};
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
  if (found == sets_.end()) return std::nullopt;
  Set& set = found->second;
  if (set.mirrored.empty()) {
    if (--set.remaining > 0) return std::nullopt;
    return set.fire(id);
  }
  const Status stored = store_counts(set);
  if (stored) return std::nullopt;
  set.mirror.clear();
  return Fired{.id = id, .callback = {}, .word = {}, .value = 0, .error = stored.error()};
}

}  // namespace kvc
