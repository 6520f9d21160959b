#include "cuda/gpu_memory.h"

#include <dlfcn.h>
#include <unistd.h>

#include <string>
#include <utility>

namespace kvc::cuda {

namespace {

// Values of cuda.h.
constexpr int kMemoryTypeAttribute = 2;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr unsigned kDeviceMemory = 2;    // CU_MEMORYTYPE_DEVICE
constexpr int kDmaBufHandle = 1;         // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

struct CudaDriver {
  int (*pointer_attribute)(void* data, int attribute, uint64_t pointer) = nullptr;
  // CUDA 11.7 and later
  int (*handle_for_range)(void* handle, uint64_t pointer, size_t bytes, int handle_type, uint64_t flags) = nullptr;
};

// Looked up each time: registrations are rare, and the driver may be loaded after the first one.
CudaDriver cuda_driver() {
  CudaDriver driver;
  void* const handle = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) return driver;
  driver.pointer_attribute =
      reinterpret_cast<decltype(driver.pointer_attribute)>(::dlsym(handle, "cuPointerGetAttribute"));
  driver.handle_for_range =
      reinterpret_cast<decltype(driver.handle_for_range)>(::dlsym(handle, "cuMemGetHandleForAddressRange"));
  ::dlclose(handle);  // it stays loaded: this only undoes our own count
  return driver;
}

Error refused(std::string message) {
  return Error{ErrorCode::kRefused, "cuda", {}, "register_region", std::move(message)};
}

}  // namespace

bool is_gpu_memory(const std::byte* address) {
  const CudaDriver driver = cuda_driver();
  if (driver.pointer_attribute == nullptr) return false;
  unsigned type = 0;
  const int error = driver.pointer_attribute(&type, kMemoryTypeAttribute, reinterpret_cast<uint64_t>(address));
  return error == 0 && type == kDeviceMemory;  // an error: memory that CUDA does not know
}

Status refuse_gpu_memory(std::string_view provider, const std::byte* address) {
  if (!is_gpu_memory(address)) return {};
  const std::string lane(provider);
  return Error{ErrorCode::kInvalidArgument,
               lane,
               {},
               "register_region",
               "this is GPU memory, which the " + lane +
                   " lane cannot reach: use nvlink or a NIC, or the provider bounce, "
                   "which goes through host memory"};
}

Result<DmaBuf> export_dma_buf(const std::byte* base, uint64_t bytes) {
  const CudaDriver driver = cuda_driver();
  if (driver.handle_for_range == nullptr) {
    return refused("this CUDA driver exports no DMA-BUF (11.7 and later do)");
  }
  // The exported range has to begin and end at pages of the host.
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uint64_t>(base);
  const uint64_t begin = address / page * page;
  const uint64_t end = (address + bytes + page - 1) / page * page;
  int fd = -1;
  if (const int error = driver.handle_for_range(&fd, begin, end - begin, kDmaBufHandle, 0); error != 0) {
    return refused("cuMemGetHandleForAddressRange: CUDA error " + std::to_string(error));
  }
  return DmaBuf{UniqueFd(fd), address - begin};
}

}  // namespace kvc::cuda
