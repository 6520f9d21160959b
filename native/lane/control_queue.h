// ControlQueue: what the thread that posts and polls leaves to the control thread, because it may block.
#pragma once

#include <functional>
#include <memory>
#include <utility>

namespace kvc {

class ControlQueue {
 public:
  virtual ~ControlQueue() = default;

  // Any thread; never blocks. `task` runs on the control thread, soon and after all that were handed over before it; the
  // threads that drive domains are then woken. Every task runs, also while the engine closes.
  virtual void run(std::function<void()> task) = 0;

  // The same for the end of something whose destructor may block.
  template <typename T>
  void dispose(std::unique_ptr<T> object) {
    if (object == nullptr) return;
    run([ended = std::shared_ptr<T>(std::move(object))]() mutable { ended.reset(); });
  }
};

// A share in something whose destructor may block, as one that frees a GPU's memory does. Wherever the last copy of a
// ControlOwned ends, also on the worker or under a lock, the engine's share in the object ends on the control thread.
template <typename T>
class ControlOwned {
 public:
  ControlOwned() = default;
  // `control` outlives every copy.
  ControlOwned(ControlQueue& control, std::shared_ptr<T> object) {
    if (object == nullptr) return;
    T* const address = object.get();
    object_ = std::shared_ptr<T>(address, [&control, kept = std::move(object)](T*) mutable {
      control.run([ended = std::move(kept)]() mutable { ended.reset(); });
    });
  }

  T* get() const noexcept { return object_.get(); }
  T* operator->() const noexcept { return object_.get(); }
  explicit operator bool() const noexcept { return object_ != nullptr; }
  // The same object, whoever holds it.
  bool operator==(const ControlOwned& other) const noexcept { return object_ == other.object_; }

 private:
  std::shared_ptr<T> object_;
};

}  // namespace kvc
