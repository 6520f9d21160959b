// Registry: objects that threads share, by id. Lookups are frequent and changes rare. Registries whose objects are
// looked up together share a mutex, so that one lock covers all.
//
// A thread that finds an object holds a reference, or the mutex in the case of peek(). A command that was submitted
// under that mutex may name an object that has been erased since. The thread that erases an object therefore keeps it
// until the transfer thread has carried out such commands (Endings::retire).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>  // std::shared_lock
#include <unordered_map>
#include <vector>

#include "base/writer_first_mutex.h"

namespace kvc {

// Any thread may call any method. A found object lives as long as the finder holds it.
template <typename T>
class Registry {
 public:
  explicit Registry(WriterFirstMutex& mutex) : mutex_(mutex) {}

  void insert(uint64_t id, std::shared_ptr<T> object) {
    const std::unique_lock lock(mutex_);
    insert_locked(id, std::move(object));
  }
  // The caller holds the mutex exclusively.
  void insert_locked(uint64_t id, std::shared_ptr<T> object) { objects_.emplace(id, std::move(object)); }
  std::shared_ptr<T> find(uint64_t id) const {
    const std::shared_lock lock(mutex_);
    const auto found = objects_.find(id);
    return found == objects_.end() ? nullptr : found->second;
  }
  // Returns any object for which `wanted`, called with the mutex held, returns true.
  template <typename Predicate>
  std::shared_ptr<T> find_if(Predicate wanted) const {
    const std::shared_lock lock(mutex_);
    for (const auto& [id, object] : objects_) {
      if (wanted(*object)) return object;
    }
    return nullptr;
  }
  // The caller holds the mutex, shared or exclusively, while it uses the object.
  T* peek(uint64_t id) const {
    const auto found = objects_.find(id);
    return found == objects_.end() ? nullptr : found->second.get();
  }
  // Returns the object if it was present. If several threads erase an id, one of them gets the object.
  std::shared_ptr<T> erase(uint64_t id) {
    const std::unique_lock lock(mutex_);
    return erase_locked(id);
  }
  // The caller holds the mutex exclusively.
  std::shared_ptr<T> erase_locked(uint64_t id) {
    auto node = objects_.extract(id);
    return node.empty() ? nullptr : std::move(node.mapped());
  }
  // Takes up to `limit` ids from the end of `ids`, which the mutex guards too, and appends their objects to `erased`.
  // Returns true if none is left. Bounded, because threads that write wait for the mutex.
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
  // Returns the objects for which `wanted`, called with the mutex held, returns true.
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
