// SlotMemory: slots of one size in host memory that both the lower lane and the GPU reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/shared_memory.h"
#include "cuda/driver.h"
#include "lane/domain.h"
#include "providers/bounce/wire.h"

namespace kvc::bounce {

// Owns the memory, its page lock, and its registration with the lower lane. Created, pinned and destroyed on the
// control thread, because each of these takes milliseconds. In between, the domain uses its slots.
class SlotMemory {
 public:
  // Allocates the slots and registers them with `below`, which outlives this object.
  static Result<std::unique_ptr<SlotMemory>> create(uint32_t slots, Connector& below);
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;
  ~SlotMemory();

  // Page-locks the memory and maps it for the GPU, once. The slots may be in use meanwhile.
  Status pin(std::shared_ptr<cuda::Context> context);

  std::byte* data() const noexcept { return memory_.data(); }
  Registration& registration() const noexcept { return *registration_; }
  std::byte* slot(uint32_t number) const noexcept { return data() + number * kSlotStride; }
  // The GPU's address of the slot's pieces. Call it after pin().
  cuda::DevicePointer pieces_on_device(uint32_t number) const noexcept {
    return device_ + number * kSlotStride + kHeaderBytes;
  }

 private:
  explicit SlotMemory(SharedMemory memory) : memory_(std::move(memory)) {}

  SharedMemory memory_;
  std::shared_ptr<cuda::Context> context_;  // null: not pinned
  cuda::DevicePointer device_ = 0;
  std::unique_ptr<Registration> registration_;
};

}  // namespace kvc::bounce
