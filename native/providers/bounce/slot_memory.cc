#include "providers/bounce/slot_memory.h"

namespace kvc::bounce {

namespace {

constexpr unsigned kPortable = 1;   // CU_MEMHOSTREGISTER_PORTABLE
constexpr unsigned kDeviceMap = 2;  // CU_MEMHOSTREGISTER_DEVICEMAP

}  // namespace

Result<std::unique_ptr<SlotMemory>> SlotMemory::create(uint32_t slots, Connector& below) {
  Result<SharedMemory> memory = SharedMemory::create("kvc-bounce", slots * kSlotStride);
  if (!memory) return memory.error();
  std::unique_ptr<SlotMemory> made(new SlotMemory(std::move(memory.value())));
  Result<std::unique_ptr<Registration>> registered =
      below.register_memory({made->memory_.data(), made->memory_.size(), made->memory_.fd(), 0});
  if (!registered) return registered.error();
  made->registration_ = std::move(registered.value());
  return made;
}

SlotMemory::~SlotMemory() {
  registration_.reset();
  if (context_ == nullptr) return;
  const cuda::Context::Scope scope(*context_);
  context_->driver().cuMemHostUnregister(data());
}

Status SlotMemory::pin(std::shared_ptr<cuda::Context> context) {
  if (context_ != nullptr) return {};
  const cuda::Driver& driver = context->driver();
  const cuda::Context::Scope scope(*context);
  if (int result = driver.cuMemHostRegister_v2(data(), memory_.size(), kPortable | kDeviceMap);
      result != cuda::kSuccess) {
    return cuda::cuda_error("register_memory", "cuMemHostRegister", result);
  }
  if (int result = driver.cuMemHostGetDevicePointer_v2(&device_, data(), 0); result != cuda::kSuccess) {
    driver.cuMemHostUnregister(data());
    return cuda::cuda_error("register_memory", "cuMemHostGetDevicePointer", result);
  }
  context_ = std::move(context);
  return {};
}

}  // namespace kvc::bounce
