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

}  // namespace kvc
