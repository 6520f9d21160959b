// Registry: objects that threads share, by id. Looked up often, changed rarely. Registries whose objects are looked up
// together share a mutex: one lock for all.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace kvc {

// Any thread may call anything. What is found stays alive as long as its finder holds it.
template <typename T>
class Registry {
 public:
  explicit Registry(std::shared_mutex& mutex) : mutex_(mutex) {}

  void insert(uint64_t id, std::shared_ptr<T> object) {
    const std::unique_lock lock(mutex_);
    objects_.emplace(id, std::move(object));
  }
  std::shared_ptr<T> find(uint64_t id) const {
    const std::shared_lock lock(mutex_);
    return find_locked(id);
  }
  // The caller holds the mutex.
  std::shared_ptr<T> find_locked(uint64_t id) const {
    const auto found = objects_.find(id);
    return found == objects_.end() ? nullptr : found->second;
  }
  // True if it was there: of several threads that erase an id, one learns that it did.
  bool erase(uint64_t id) {
    const std::unique_lock lock(mutex_);
    return objects_.erase(id) > 0;
  }
  template <typename Predicate>
  void erase_if(Predicate gone) {
    const std::unique_lock lock(mutex_);
    std::erase_if(objects_, [&](const auto& entry) { return gone(*entry.second); });
  }
  std::vector<std::shared_ptr<T>> all() const {
    const std::shared_lock lock(mutex_);
    std::vector<std::shared_ptr<T>> objects;
    objects.reserve(objects_.size());
    for (const auto& [id, object] : objects_) objects.push_back(object);
    return objects;
  }
  size_t size() const {
    const std::shared_lock lock(mutex_);
    return objects_.size();
  }

 private:
  std::shared_mutex& mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<T>> objects_;
};

}  // namespace kvc
