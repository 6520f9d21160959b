#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstring>
#include <mutex>
#include <type_traits>

namespace kvc::cuda {

namespace {

// CUDA 12.0: the oldest driver that runs the kernels' PTX and has these versions of the functions.
constexpr int kOldestDriver = 12000;

constexpr unsigned kMemoryTypeDevice = 2;  // CU_MEMORYTYPE_DEVICE

constexpr unsigned kHostPortable = 1;       // CU_MEMHOSTALLOC_PORTABLE
constexpr unsigned kHostDeviceMap = 2;      // CU_MEMHOSTALLOC_DEVICEMAP
constexpr unsigned kStreamNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr int kMaxDynamicShared = 8;        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

// The mutex guards the following variables. The table does not change once it is filled.
std::mutex mutex;
Driver table{};
bool filled = false;
bool ready = false;   // the driver is also initialised and new enough
std::string missing;  // names of missing functions

// Fills the table if the library is there; false otherwise. `mode` is 0 or RTLD_NOLOAD. The caller holds the mutex.
bool fill_table(int mode) {
  if (filled) return true;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | mode);
  if (library == nullptr) return false;
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    return function != nullptr;
  };
#define KVC_FIND(name) \
  if (!find(table.name, #name)) missing += (missing.empty() ? "" : ", ") + std::string(#name)
  KVC_FIND(cuInit);
  KVC_FIND(cuDriverGetVersion);
  KVC_FIND(cuGetErrorName);
  KVC_FIND(cuGetErrorString);
  KVC_FIND(cuDeviceGetCount);
  KVC_FIND(cuDeviceGet);
  KVC_FIND(cuDeviceGetName);
  KVC_FIND(cuDeviceGetAttribute);
  KVC_FIND(cuDevicePrimaryCtxRetain);
  KVC_FIND(cuDevicePrimaryCtxRelease_v2);
  KVC_FIND(cuCtxGetCurrent);
  KVC_FIND(cuCtxGetDevice);
  KVC_FIND(cuCtxPushCurrent_v2);
  KVC_FIND(cuCtxPopCurrent_v2);
  KVC_FIND(cuCtxGetFlags);
  KVC_FIND(cuCtxSynchronize);
  KVC_FIND(cuCtxGetStreamPriorityRange);
  KVC_FIND(cuCtxEnablePeerAccess);
  KVC_FIND(cuMemAlloc_v2);
  KVC_FIND(cuMemFree_v2);
  KVC_FIND(cuMemHostAlloc);
  KVC_FIND(cuMemFreeHost);
  KVC_FIND(cuMemHostRegister_v2);
  KVC_FIND(cuMemHostUnregister);
  KVC_FIND(cuMemHostGetDevicePointer_v2);
  KVC_FIND(cuMemcpyHtoD_v2);
  KVC_FIND(cuMemcpyDtoH_v2);
  KVC_FIND(cuMemcpyDtoDAsync_v2);
  KVC_FIND(cuMemsetD8_v2);
  KVC_FIND(cuPointerGetAttribute);
  KVC_FIND(cuPointerGetAttributes);
  KVC_FIND(cuPointerSetAttribute);
  KVC_FIND(cuFlushGPUDirectRDMAWrites);
  KVC_FIND(cuMemGetHandleForAddressRange);
  KVC_FIND(cuIpcGetMemHandle);
  KVC_FIND(cuIpcOpenMemHandle_v2);
  KVC_FIND(cuIpcCloseMemHandle);
  KVC_FIND(cuMemAddressReserve);
  KVC_FIND(cuMemAddressFree);
  KVC_FIND(cuMemMap);
  KVC_FIND(cuMemUnmap);
  KVC_FIND(cuMemSetAccess);
  KVC_FIND(cuMemCreate);
  KVC_FIND(cuMemGetAllocationGranularity);
  KVC_FIND(cuMemRelease);
  KVC_FIND(cuMemRetainAllocationHandle);
  KVC_FIND(cuMemExportToShareableHandle);
  KVC_FIND(cuMemImportFromShareableHandle);
  KVC_FIND(cuThreadExchangeStreamCaptureMode);
  KVC_FIND(cuStreamCreateWithPriority);
  KVC_FIND(cuStreamDestroy_v2);
  KVC_FIND(cuStreamQuery);
  KVC_FIND(cuStreamSynchronize);
  KVC_FIND(cuStreamWriteValue64_v2);
  KVC_FIND(cuModuleLoadData);
  KVC_FIND(cuModuleUnload);
  KVC_FIND(cuModuleGetFunction);
  KVC_FIND(cuFuncSetAttribute);
  KVC_FIND(cuLaunchKernel);
  KVC_FIND(cuLaunchKernelEx);
#undef KVC_FIND
  find(table.cuCtxSetFlags, "cuCtxSetFlags");
  find(table.cuMemcpyBatchAsync, "cuMemcpyBatchAsync");
  return filled = true;
}

Status initialise() {
  if (!missing.empty()) {
    return cuda_refused("open", "the CUDA driver lacks " + missing + ": CUDA 12.0 or later is needed");
  }
  if (const int result = table.cuInit(0); result != kSuccess) {
    Error error = cuda_error("open", "cuInit", result);
    error.code = ErrorCode::kRefused;
    return error;
  }
  int version = 0;
  table.cuDriverGetVersion(&version);
  if (version < kOldestDriver) {
    return cuda_refused("open", "the CUDA driver has version " + std::to_string(version / 1000) + "." +
                                    std::to_string(version % 1000 / 10) + ": 12.0 or later is needed");
  }
  int devices = 0;
  table.cuDeviceGetCount(&devices);
  if (devices == 0) return cuda_refused("open", "no GPU is visible to this process: check CUDA_VISIBLE_DEVICES");
  return {};
}

}  // namespace

Result<const Driver*> driver() {
  const std::lock_guard lock(mutex);
  if (!fill_table(0)) {
    const char* why = dlerror();
    return cuda_refused("open", std::string("no CUDA driver: ") +
                                    (why != nullptr ? why : "libcuda.so.1 cannot be opened") +
                                    " (install the NVIDIA driver; in containers run with --gpus)");
  }
  if (!ready) {
    if (Status status = initialise(); !status) return status.error();
    ready = true;
  }
  return &table;
}

const Driver* loaded_driver() {
  const std::lock_guard lock(mutex);
  return fill_table(RTLD_NOLOAD) ? &table : nullptr;
}

Error cuda_error(std::string_view operation, std::string_view call, int result) {
  const char* name = nullptr;
  const char* words = nullptr;
  if (table.cuGetErrorName != nullptr) table.cuGetErrorName(result, &name);
  if (table.cuGetErrorString != nullptr) table.cuGetErrorString(result, &words);
  std::string message(call);
  message += std::string(": ") + (name != nullptr ? name : "error " + std::to_string(result));
  if (words != nullptr) message += std::string(" (") + words + ")";
  constexpr int kOutOfMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY
  const ErrorCode code = result == kOutOfMemory ? ErrorCode::kResources : ErrorCode::kSystem;
  return Error{code, "cuda", {}, std::string(operation), std::move(message)};
}

Error cuda_refused(std::string_view operation, std::string message) {
  return Error{ErrorCode::kRefused, "cuda", {}, std::string(operation), std::move(message)};
}

Result<std::shared_ptr<Context>> Context::retain(int device) {
  const Result<const Driver*> loaded = cuda::driver();
  if (!loaded) return loaded.error();
  const Driver& driver = *loaded.value();
  const RelaxedCapture relaxed(driver);
  int handle = 0;
  if (const int result = driver.cuDeviceGet(&handle, device); result != kSuccess) {
    return cuda_error("open", "cuDeviceGet(" + std::to_string(device) + ")", result);
  }
  ContextHandle context = nullptr;
  if (const int result = driver.cuDevicePrimaryCtxRetain(&context, handle); result != kSuccess) {
    return cuda_error("open", "cuDevicePrimaryCtxRetain", result);
  }
  return std::make_shared<Context>(driver, handle, context);
}

std::string Context::name() const {
  std::array<char, 128> name{};
  driver_.cuDeviceGetName(name.data(), static_cast<int>(name.size()) - 1, device_);
  return name.data();
}

int Context::attribute(int attribute) const {
  int value = 0;
  return driver_.cuDeviceGetAttribute(&value, attribute, device_) == kSuccess ? value : 0;
}

Result<ContextHandle> current_context(const Driver& driver, std::string_view operation) {
  ContextHandle context = nullptr;
  driver.cuCtxGetCurrent(&context);
  if (context == nullptr) {
    return cuda_refused(operation,
                        "no CUDA context is current on this thread: call it on the thread of the forward pass");
  }
  return context;
}

Result<bool> is_device_memory(const Driver& driver, DevicePointer address) {
  const RelaxedCapture relaxed(driver);
  unsigned type = 0;
  // cuPointerGetAttributes() returns no type for memory that CUDA does not know. The singular call fails for it, which
  // sanitizers report.
  int attribute = kPointerMemoryType;
  void* value = &type;
  const int result = driver.cuPointerGetAttributes(1, &attribute, &value, address);
  if (result != kSuccess) return cuda_error("register_memory", "cuPointerGetAttributes(MEMORY_TYPE)", result);
  return type == kMemoryTypeDevice;
}

Result<Placement> placement(const Driver& driver, const void* pointer) {
  const auto address = reinterpret_cast<DevicePointer>(pointer);
  const Result<bool> of_a_gpu = is_device_memory(driver, address);
  if (!of_a_gpu) return of_a_gpu.error();
  if (!of_a_gpu.value()) return Placement{};
  const RelaxedCapture relaxed(driver);
  Placement found;
  size_t bytes = 0;
  int capable = 0;
  if (int failed = driver.cuPointerGetAttribute(&found.device, kPointerDevice, address); failed != kSuccess) {
    return cuda_error("register_memory", "cuPointerGetAttribute(DEVICE_ORDINAL)", failed);
  }
  if (int failed = driver.cuPointerGetAttribute(&found.allocation, kPointerRangeStart, address); failed != kSuccess) {
    return cuda_error("register_memory", "cuPointerGetAttribute(RANGE_START_ADDR)", failed);
  }
  if (int failed = driver.cuPointerGetAttribute(&bytes, kPointerRangeSize, address); failed != kSuccess) {
    return cuda_error("register_memory", "cuPointerGetAttribute(RANGE_SIZE)", failed);
  }
  driver.cuPointerGetAttribute(&capable, kPointerIpcCapable, address);
  found.allocation_bytes = bytes;
  found.ipc_capable = capable != 0;
  return found;
}

Result<PinnedMemory> PinnedMemory::allocate(const Driver& driver, size_t bytes) {
  PinnedMemory memory;
  memory.driver_ = &driver;
  if (const int result = driver.cuMemHostAlloc(&memory.data_, bytes, kHostPortable | kHostDeviceMap);
      result != kSuccess) {
    memory.data_ = nullptr;
    return cuda_error("open", "cuMemHostAlloc", result);
  }
  std::memset(memory.data_, 0, bytes);
  if (const int result = driver.cuMemHostGetDevicePointer_v2(&memory.device_, memory.data_, 0); result != kSuccess) {
    return cuda_error("open", "cuMemHostGetDevicePointer", result);
  }
  return memory;
}

Result<OwnedStream> OwnedStream::create(const Driver& driver, Priority priority) {
  int lowest = 0;
  int highest = 0;
  if (const int result = driver.cuCtxGetStreamPriorityRange(&lowest, &highest); result != kSuccess) {
    return cuda_error("open", "cuCtxGetStreamPriorityRange", result);
  }
  OwnedStream stream;
  stream.driver_ = &driver;
  const int value = priority == Priority::kLowest ? lowest : highest;
  if (const int result = driver.cuStreamCreateWithPriority(&stream.stream_, kStreamNonBlocking, value);
      result != kSuccess) {
    stream.stream_ = nullptr;
    return cuda_error("open", "cuStreamCreateWithPriority", result);
  }
  return stream;
}

Result<Module> Module::load(const Driver& driver) {
  const std::span<const unsigned char> image = kernel_image();
  if (image.empty()) {
    return cuda_refused(
        "open", "this build holds no GPU kernels: nvcc was not found when it was built. Put nvcc in PATH and rebuild");
  }
  Module module;
  module.driver_ = &driver;
  if (const int result = driver.cuModuleLoadData(&module.module_, image.data()); result != kSuccess) {
    module.module_ = nullptr;
    Error error = cuda_error("open", "cuModuleLoadData", result);
    error.code = ErrorCode::kRefused;
    return error;
  }
  return module;
}

Result<Function> Module::function(const char* name, uint32_t shared_bytes) const {
  Function function = nullptr;
  if (const int result = driver_->cuModuleGetFunction(&function, module_, name); result != kSuccess) {
    return cuda_error("open", std::string("cuModuleGetFunction ") + name, result);
  }
  if (shared_bytes > 0) {
    if (const int result = driver_->cuFuncSetAttribute(function, kMaxDynamicShared, static_cast<int>(shared_bytes));
        result != kSuccess) {
      return cuda_error("open", std::string("cuFuncSetAttribute ") + name, result);
    }
  }
  return function;
}

}  // namespace kvc::cuda
