// The memory of a Group, for the files that implement it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "moe/far_ranks.h"
#include "moe/group.h"

namespace kvc::moe {

inline constexpr int kHopper = 9;               // compute capability that supports programmatic dependent launch
inline constexpr int kDependentGraphs = 12030;  // first driver that captures such launches into graphs

// Sizes of the local memory: a Control and the masks of each slot, then the owners.
struct Local {
  uint64_t slot_bytes;
  uint64_t bytes;
};
inline Local local_of(const GroupConfig& config) {
  const uint64_t slot = (sizeof(Control) + uint64_t{config.max_tokens} * sizeof(uint32_t) + 127) / 128 * 128;
  return {slot, slot * config.slots + config.experts};
}

struct Group::Memory {
  // The rank that admit() is to bring in.
  struct Newcomer {
    uint32_t rank = 0;
    std::unique_ptr<Segment> segment;  // null: none
    UniqueFd descriptor;               // of the segment
  };
  struct Kernels {
    cuda::Module module;
    cuda::Function dispatch = nullptr;
    std::array<cuda::Function, 2> combine{};  // with one and with two vectors per thread
  };

  ~Memory() {
    if (!context) return;
    const cuda::Context::Scope scope(*context);
    if (local != 0) context->driver().cuMemFree_v2(local);
    kernels = {};
    pinned = {};
  }
  // True if launches on the GPU begin before the previous launch has ended.
  bool overlaps() const { return major >= kHopper && driver_version >= kDependentGraphs; }

  std::shared_ptr<cuda::Context> context;  // null: host memory
  int major = 0;
  int driver_version = 0;
  uint32_t processors = 1;
  Kernels kernels;
  std::array<std::unique_ptr<Segment>, kMaxRanks> segments;
  cuda::PinnedMemory pinned;      // HostWords
  cuda::DevicePointer local = 0;  // Control and masks of each slot, then the owners
  std::vector<uint64_t> local_on_host;
  HostWords words_on_host{};
  uint32_t experts_per_rank = 0;
  bool has_owners = false;
  FarRanks* far = nullptr;  // ranks of other nodes; null: none
  Newcomer newcomer;

  bool reaches(uint32_t rank) const noexcept {
    return segments[rank] != nullptr || (far != nullptr && (far->config().far >> rank & 1U) != 0);
  }
  unsigned char* control(const GroupConfig& config, uint32_t slot) const noexcept;  // of the slot
  HostWords* words() noexcept { return context ? static_cast<HostWords*>(pinned.data()) : &words_on_host; }
  HostWords* words_for_kernels() noexcept {
    return context ? reinterpret_cast<HostWords*>(pinned.device()) : &words_on_host;
  }
};

// A call that uses the memory: close() waits for its end.
class Group::Use {
 public:
  explicit Use(const Group& group) : group_(const_cast<Group&>(group)) {
    const std::lock_guard lock(group_.mutex_);
    if (!group_.memory_ || group_.closing_) return;
    memory_ = group_.memory_.get();
    alone_ = ++group_.uses_ == 1;
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ~Use() {
    if (memory_ == nullptr) return;
    const std::lock_guard lock(group_.mutex_);
    if (--group_.uses_ == 0) group_.unused_.notify_all();
  }
  // Null if the group is closed.
  Memory* memory() const noexcept { return memory_; }
  bool alone() const noexcept { return alone_; }

 private:
  Group& group_;
  Memory* memory_ = nullptr;
  bool alone_ = false;
};

inline Error closed(std::string_view operation) {
  return Error{ErrorCode::kClosed, {}, {}, std::string(operation), "the group is closed"};
}

}  // namespace kvc::moe
