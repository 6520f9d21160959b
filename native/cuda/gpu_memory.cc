#include "cuda/gpu_memory.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "cuda/driver.h"

namespace kvc::cuda {

namespace {

// Values from cuda.h.
constexpr unsigned kContextSyncMemops = 0x80;  // CU_CTX_SYNC_MEMOPS
constexpr int kDmaBufHandle = 1;               // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

// Does the work of make_synchronous() for memory in pieces on this device.
Status make_context_synchronous(const Driver& driver, int device) {
  if (driver.cuCtxSetFlags == nullptr) return {};
  const Result<std::shared_ptr<Context>> context = Context::retain(device);
  if (!context) return context.error();
  const Context::Scope scope(*context.value());
  unsigned flags = 0;
  int result = driver.cuCtxGetFlags(&flags);
  if (result == kSuccess && (flags & kContextSyncMemops) == 0) {
    result = driver.cuCtxSetFlags(flags | kContextSyncMemops);
  }
  if (result != kSuccess) return cuda_error("register_memory", "cuCtxSetFlags(SYNC_MEMOPS)", result);
  return {};
}

}  // namespace

bool is_gpu_memory(const std::byte* address) {
  const Driver* const driver = loaded_driver();
  if (driver == nullptr) return false;
  const Result<bool> found = is_device_memory(*driver, reinterpret_cast<DevicePointer>(address));
  return found && found.value();  // an error means a driver without a GPU
}

const std::byte* allocation_end(const std::byte* address) {
  if (!is_gpu_memory(address)) return nullptr;
  const Driver& driver = *loaded_driver();
  const RelaxedCapture relaxed(driver);
  const auto pointer = reinterpret_cast<DevicePointer>(address);
  const auto end = [&](int of_start, int of_size) -> DevicePointer {
    DevicePointer start = 0;
    size_t bytes = 0;
    if (driver.cuPointerGetAttribute(&start, of_start, pointer) != kSuccess) return 0;
    if (driver.cuPointerGetAttribute(&bytes, of_size, pointer) != kSuccess) return 0;
    return start + bytes;
  };
  // For memory in pieces, the range is everything that was reserved, including parts where nothing is mapped.
  const DevicePointer range = end(kPointerRangeStart, kPointerRangeSize);
  const DevicePointer piece = end(kPointerMappingStart, kPointerMappingSize);
  return reinterpret_cast<const std::byte*>(piece > pointer ? std::min(piece, range) : range);
}

Status refuse_gpu_memory(std::string_view provider, const std::byte* address) {
  if (!is_gpu_memory(address)) return {};
  const std::string lane(provider);
  return Error{ErrorCode::kNotReachable,
               lane,
               {},
               "register_memory",
               "the " + lane +
                   " lane cannot reach GPU memory: use nvlink, a NIC, or the provider bounce, which copies "
                   "through host memory"};
}

Status make_synchronous(const std::byte* address) {
  if (!is_gpu_memory(address)) return {};
  const Driver& driver = *loaded_driver();
  const RelaxedCapture relaxed(driver);
  const auto pointer = reinterpret_cast<DevicePointer>(address);
  const unsigned on = 1;
  int result = driver.cuPointerSetAttribute(&on, kPointerSyncMemops, pointer);
  if (result == kSuccess) return {};
  int device = 0;
  if (result == kNotSupported) result = driver.cuPointerGetAttribute(&device, kPointerDevice, pointer);
  if (result != kSuccess) return cuda_error("register_memory", "cuPointerSetAttribute(SYNC_MEMOPS)", result);
  return make_context_synchronous(driver, device);
}

Result<DmaBuf> export_dma_buf(const std::byte* base, uint64_t bytes) {
  const Driver* const driver = loaded_driver();
  if (driver == nullptr || driver->cuMemGetHandleForAddressRange == nullptr) {
    return cuda_refused("register_memory", "this CUDA driver cannot export a DMA-BUF: CUDA 11.7 or later is needed");
  }
  const RelaxedCapture relaxed(*driver);
  // The exported range must begin and end at page boundaries of the host.
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uint64_t>(base);
  const uint64_t begin = address / page * page;
  const uint64_t end = (address + bytes + page - 1) / page * page;
  int fd = -1;
  if (const int error = driver->cuMemGetHandleForAddressRange(&fd, begin, end - begin, kDmaBufHandle, 0);
      error != kSuccess) {
    return cuda_refused("register_memory", "cuMemGetHandleForAddressRange: CUDA error " + std::to_string(error));
  }
  return DmaBuf{UniqueFd(fd), address - begin};
}

}  // namespace kvc::cuda
