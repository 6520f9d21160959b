// ControlQueue: takes tasks that may block from the transfer thread to the control thread.
#pragma once

#include <functional>
#include <memory>
#include <utility>

namespace kvc {

class ControlQueue {
 public:
  virtual ~ControlQueue() = default;

  // Any thread; never blocks. `task` runs on the control thread soon, after all tasks handed over before it. The
  // threads that drive domains are woken afterwards. Every task runs, also while the transfer engine closes.
  virtual void run(std::function<void()> task) = 0;

  // Destroys `object` on the control thread, for objects whose destructor may block.
  template <typename T>
  void dispose(std::unique_ptr<T> object) {
    if (object == nullptr) return;
    run([ended = std::shared_ptr<T>(std::move(object))]() mutable { ended.reset(); });
  }
};

// A shared reference to an object whose destructor may block (for example, one that frees GPU memory). The last copy of
// a ControlOwned may end anywhere, also on the transfer thread or under a lock. The reference to the object is then
// released on the control thread.
template <typename T>
class ControlOwned {
 public:
  ControlOwned() = default;
  // `control` must outlive every copy.
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
  // Whether both refer to the same object.
  bool operator==(const ControlOwned& other) const noexcept { return object_ == other.object_; }

 private:
  std::shared_ptr<T> object_;
};

}  // namespace kvc
