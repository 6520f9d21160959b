#include "providers/bounce/slot_memory.h"

namespace kvc::bounce {

namespace {

constexpr unsigned kPortable = 1;   // CU_MEMHOSTREGISTER_PORTABLE
constexpr unsigned kDeviceMap = 2;  // CU_MEMHOSTREGISTER_DEVICEMAP

}  // namespace

Result<std::unique_ptr<SlotMemory>> SlotMemory::create(uint32_t slots) {
  Result<SharedMemory> memory = SharedMemory::create("kvc-bounce", slots * kSlotStride);
  if (!memory) return memory.error();
  return std::unique_ptr<SlotMemory>(new SlotMemory(std::move(memory.value())));
}

SlotMemory::~SlotMemory() {
  if (context_ == nullptr) return;
  const cuda::Context::Scope scope(*context_);
  context_->driver().cuMemHostUnregister(data());
}

Status SlotMemory::pin(std::shared_ptr<cuda::Context> context) {
  if (context_ != nullptr) return {};
  const cuda::Driver& driver = context->driver();
  const cuda::Context::Scope scope(*context);
  if (int result = driver.cuMemHostRegister_v2(data(), size(), kPortable | kDeviceMap); result != cuda::kSuccess) {
    return cuda::cuda_error("register_region", "cuMemHostRegister", result);
  }
  if (int result = driver.cuMemHostGetDevicePointer_v2(&device_, data(), 0); result != cuda::kSuccess) {
    driver.cuMemHostUnregister(data());
    return cuda::cuda_error("register_region", "cuMemHostGetDevicePointer", result);
  }
  context_ = std::move(context);
  return {};
}

}  // namespace kvc::bounce
