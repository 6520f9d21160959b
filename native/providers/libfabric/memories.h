// Memories: our registered regions, as one endpoint uses them. Most devices register a region once for all endpoints.
// On other devices (FI_MR_ENDPOINT) a region is registered with the endpoint at its first use there, which may block.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lane/control_queue.h"
#include "providers/libfabric/endpoint.h"
#include "providers/libfabric/region.h"

namespace kvc::libfabric {

// Used on the driving thread only; nothing blocks.
class Memories {
 public:
  Memories(std::shared_ptr<Endpoint> endpoint, ControlQueue& control)
      : endpoint_(std::move(endpoint)), control_(control) {}

  // Returns the region's memory for this endpoint. Null while the control thread registers it, which wakes the driving
  // thread afterwards.
  Result<fid_mr*> of(const Region& region) {
    if (region.memory != nullptr) return region.memory.get();
    std::shared_ptr<Bound>& bound = bound_[&region];
    if (bound == nullptr) {
      bound = std::make_shared<Bound>();
      control_.run([endpoint = endpoint_, bound, base = region.base, bytes = region.bytes] {
        bound->memory.emplace(endpoint->bind(base, bytes));
        bound->ready.store(true, std::memory_order_release);
      });
    }
    if (!bound->ready.load(std::memory_order_acquire)) return static_cast<fid_mr*>(nullptr);
    if (!*bound->memory) return bound->memory->error();
    return bound->memory->value().get();
  }

  // Ends the region's registration with this endpoint. Returns false while the control thread works on it: call again.
  bool release(const Region& region) {
    const auto found = bound_.find(&region);
    if (found == bound_.end()) return true;
    if (!found->second->ready.load(std::memory_order_acquire)) return false;
    control_.run([bound = std::move(found->second)] { bound->memory.reset(); });
    bound_.erase(found);
    return true;
  }

  // Returns a task that closes the endpoint after its registrations. Run the task on the control thread, and only once.
  std::function<void()> end() {
    return [endpoint = endpoint_, bound = std::exchange(bound_, {})] {
      // NOLINTNEXTLINE(bugprone-nondeterministic-pointer-iteration-order): they may end in any order
      for (const auto& [region, memory] : bound) memory->memory.reset();
      endpoint->close();
    };
  }

 private:
  struct Bound {
    std::optional<Result<Memory>> memory;  // used by the control thread until `ready`, and again in its last task
    std::atomic<bool> ready = false;
  };

  const std::shared_ptr<Endpoint> endpoint_;
  ControlQueue& control_;
  std::unordered_map<const Region*, std::shared_ptr<Bound>> bound_;
};

}  // namespace kvc::libfabric
