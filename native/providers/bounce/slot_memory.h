// SlotMemory: slots of one size in host memory that both the lane below and the GPU reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "cuda/driver.h"
#include "engine/error.h"
#include "engine/shared_memory.h"
#include "providers/bounce/wire.h"

namespace kvc::bounce {

// Owns the memory and its page lock. Worker thread only.
class SlotMemory {
 public:
  // Takes no memory before it is touched, or pinned.
  static Result<std::unique_ptr<SlotMemory>> create(uint32_t slots);
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;
  ~SlotMemory();

  // Page-locks it and maps it for the GPU: milliseconds, the first time.
  Status pin(std::shared_ptr<cuda::Context> context);

  std::byte* data() const noexcept { return memory_.data(); }
  uint64_t size() const noexcept { return memory_.size(); }
  int fd() const noexcept { return memory_.fd(); }
  std::byte* slot(uint32_t number) const noexcept { return data() + number * kSlotStride; }
  // Where the GPU finds the slot's pieces; after pin().
  cuda::DevicePointer pieces_on_device(uint32_t number) const noexcept {
    return device_ + number * kSlotStride + kHeaderBytes;
  }

 private:
  explicit SlotMemory(SharedMemory memory) : memory_(std::move(memory)) {}

  SharedMemory memory_;
  std::shared_ptr<cuda::Context> context_;  // null: not pinned
  cuda::DevicePointer device_ = 0;
};

}  // namespace kvc::bounce
