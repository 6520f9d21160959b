// Registry: objects that threads share, by id. Looked up often, changed rarely. Registries whose objects are looked up
// together share a mutex: one lock for all.
//
// Who finds an object holds a reference, or else, by peek(), the mutex. What was submitted to the worker under that mutex
// may name an object that has been erased meanwhile: who erases keeps it until the worker has carried that out
// (Endings::retire).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>  // std::shared_lock
#include <unordered_map>
#include <vector>

#include "base/writer_first_mutex.h"

namespace kvc {

// Any thread may call anything. What is found stays alive as long as its finder holds it.
template <typename T>
class Registry {
 public:
  explicit Registry(WriterFirstMutex& mutex) : mutex_(mutex) {}

  void insert(uint64_t id, std::shared_ptr<T> object) {
    const std::unique_lock lock(mutex_);
    insert_locked(id, std::move(object));
  }
  // The caller holds the mutex, not shared.
  void insert_locked(uint64_t id, std::shared_ptr<T> object) { objects_.emplace(id, std::move(object)); }
  std::shared_ptr<T> find(uint64_t id) const {
    const std::shared_lock lock(mutex_);
    const auto found = objects_.find(id);
    return found == objects_.end() ? nullptr : found->second;
  }
  // Any one of which `wanted`, called with the mutex held, says so.
  template <typename Predicate>
  std::shared_ptr<T> find_if(Predicate wanted) const {
    const std::shared_lock lock(mutex_);
    for (const auto& [id, object] : objects_) {
      if (wanted(*object)) return object;
    }
    return nullptr;
  }
  // The caller holds the mutex, shared or not, as long as it uses what it gets.
  T* peek(uint64_t id) const {
    const auto found = objects_.find(id);
    return found == objects_.end() ? nullptr : found->second.get();
  }
  // The object, if it was there: of several threads that erase an id, one gets it.
  std::shared_ptr<T> erase(uint64_t id) {
    const std::unique_lock lock(mutex_);
    return erase_locked(id);
  }
  // The caller holds the mutex, not shared.
  std::shared_ptr<T> erase_locked(uint64_t id) {
    auto node = objects_.extract(id);
    return node.empty() ? nullptr : std::move(node.mapped());
  }
  // Takes up to `limit` ids from the end of `ids`, which the mutex guards as well, and appends their objects to `erased`. True
  // if none is left. Bounded: whoever writes waits for the mutex.
  template <typename Id>
  bool erase_some(std::vector<Id>& ids, size_t limit, std::vector<std::shared_ptr<T>>& erased) {
    const std::unique_lock lock(mutex_);
    for (; limit > 0 && !ids.empty(); --limit, ids.pop_back()) {
      if (std::shared_ptr<T> object = erase_locked(ids.back())) erased.push_back(std::move(object));
    }
    return ids.empty();
  }
  std::vector<std::shared_ptr<T>> all() const {
    return all_if([](const T&) { return true; });
  }
  // Those of which `wanted`, called with the mutex held, says so.
  template <typename Predicate>
  std::vector<std::shared_ptr<T>> all_if(Predicate wanted) const {
    const std::shared_lock lock(mutex_);
    std::vector<std::shared_ptr<T>> objects;
    for (const auto& [id, object] : objects_) {
      if (wanted(*object)) objects.push_back(object);
    }
    return objects;
  }
  size_t size() const {
    const std::shared_lock lock(mutex_);
    return objects_.size();
  }

 private:
  WriterFirstMutex& mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<T>> objects_;
};

}  // namespace kvc
