// Driver: the CUDA driver, opened at run time. No build or wheel depends on it, and a machine without it gets the
// reason as an error.
//
// It declares only the calls that kv-connector uses, in the driver's terms. The driver's C ABI is stable, so the build
// needs no CUDA header. The status of each call becomes an Error; nothing here throws. Any thread may call any function.
// A call that works on "the current context" states it, and must be made in a Context::Scope.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace kvc::cuda {

using DevicePointer = unsigned long long;     // CUdeviceptr
using Stream = struct CUstream_st*;           // CUstream; null: the legacy default stream
using ContextHandle = struct CUctx_st*;       // CUcontext
using ModuleHandle = struct CUmod_st*;        // CUmodule
using Function = struct CUfunc_st*;           // CUfunction
using AllocationHandle = unsigned long long;  // CUmemGenericAllocationHandle: a physical allocation, mapped or not

// CUipcMemHandle: names an allocation for other processes on the machine.
struct IpcHandle {
  std::array<std::byte, 64> bytes{};
  bool operator==(const IpcHandle&) const = default;
};

// CUmemAccessDesc: access rights of one device to mapped memory.
struct MemoryAccess {
  int location_type;  // CUmemLocationType
  int location;       // the device's ordinal
  int flags;          // CUmemAccess_flags
};
static_assert(sizeof(MemoryAccess) == 12);

// CUmemAllocationProp: properties of an allocation of cuMemCreate.
struct AllocationProperties {
  int type;           // CUmemAllocationType
  int handle_types;   // CUmemAllocationHandleType
  int location_type;  // CUmemLocationType
  int location;       // the device's ordinal
  void* windows;      // null
  unsigned char flags[8];
};
static_assert(sizeof(AllocationProperties) == 32);

// CUlaunchAttribute and CUlaunchConfig: a launch with attributes beyond grid and stream.
struct LaunchAttribute {
  int id;  // CUlaunchAttributeID
  int padding;
  union {
    int value;
    unsigned char bytes[64];
  };
};
static_assert(sizeof(LaunchAttribute) == 72);
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

// CUmemcpyAttributes: properties of the copies of a batch.
struct CopyAttributes {
  int source_order;    // CUmemcpySrcAccessOrder
  int source_hint[2];  // CUmemLocation, for managed memory
  int target_hint[2];
  unsigned flags;  // CUmemcpyFlags
};
static_assert(sizeof(CopyAttributes) == 24);

// The driver's functions under their exported names. Looked up once, never unloaded.
struct Driver {
  int (*cuInit)(unsigned);
  int (*cuDriverGetVersion)(int*);
  int (*cuGetErrorName)(int, const char**);
  int (*cuGetErrorString)(int, const char**);
  int (*cuDeviceGetCount)(int*);
  int (*cuDeviceGet)(int*, int);
  int (*cuDeviceGetName)(char*, int, int);
  int (*cuDeviceGetAttribute)(int*, int, int);
  int (*cuDevicePrimaryCtxRetain)(ContextHandle*, int);
  int (*cuDevicePrimaryCtxRelease_v2)(int);
  int (*cuCtxGetCurrent)(ContextHandle*);
  int (*cuCtxGetDevice)(int*);
  int (*cuCtxPushCurrent_v2)(ContextHandle);
  int (*cuCtxPopCurrent_v2)(ContextHandle*);
  int (*cuCtxGetFlags)(unsigned*);
  int (*cuCtxSetFlags)(unsigned);  // null before CUDA 12.1
  int (*cuCtxSynchronize)();
  int (*cuCtxGetStreamPriorityRange)(int*, int*);
  int (*cuCtxEnablePeerAccess)(ContextHandle, unsigned);
  int (*cuMemAlloc_v2)(DevicePointer*, size_t);
  int (*cuMemFree_v2)(DevicePointer);
  int (*cuMemHostAlloc)(void**, size_t, unsigned);
  int (*cuMemFreeHost)(void*);
  int (*cuMemHostRegister_v2)(void*, size_t, unsigned);
  int (*cuMemHostUnregister)(void*);
  int (*cuMemHostGetDevicePointer_v2)(DevicePointer*, void*, unsigned);
  int (*cuMemcpyHtoD_v2)(DevicePointer, const void*, size_t);
  int (*cuMemcpyDtoH_v2)(void*, DevicePointer, size_t);
  int (*cuMemcpyDtoDAsync_v2)(DevicePointer, DevicePointer, size_t, Stream);
  int (*cuMemcpyBatchAsync)(DevicePointer*, DevicePointer*, size_t*, size_t, CopyAttributes*, size_t*, size_t, size_t*,
                            Stream);  // null before CUDA 12.8
  int (*cuMemsetD8_v2)(DevicePointer, unsigned char, size_t);
  int (*cuPointerGetAttribute)(void*, int, DevicePointer);
  int (*cuPointerGetAttributes)(unsigned, int*, void**, DevicePointer);
  int (*cuPointerSetAttribute)(const void*, int, DevicePointer);
  int (*cuFlushGPUDirectRDMAWrites)(int, int);
  int (*cuMemGetHandleForAddressRange)(void*, DevicePointer, size_t, int, unsigned long long);
  int (*cuIpcGetMemHandle)(IpcHandle*, DevicePointer);
  int (*cuIpcOpenMemHandle_v2)(DevicePointer*, IpcHandle, unsigned);
  int (*cuIpcCloseMemHandle)(DevicePointer);
  int (*cuMemAddressReserve)(DevicePointer*, size_t, size_t, DevicePointer, unsigned long long);
  int (*cuMemAddressFree)(DevicePointer, size_t);
  int (*cuMemMap)(DevicePointer, size_t, size_t, AllocationHandle, unsigned long long);
  int (*cuMemUnmap)(DevicePointer, size_t);
  int (*cuMemSetAccess)(DevicePointer, size_t, const MemoryAccess*, size_t);
  int (*cuMemCreate)(AllocationHandle*, size_t, const AllocationProperties*, unsigned long long);
  int (*cuMemGetAllocationGranularity)(size_t*, const AllocationProperties*, int);
  int (*cuMemRelease)(AllocationHandle);
  int (*cuMemRetainAllocationHandle)(AllocationHandle*, void*);
  int (*cuMemExportToShareableHandle)(void*, AllocationHandle, int, unsigned long long);
  int (*cuMemImportFromShareableHandle)(AllocationHandle*, void*, int);
  int (*cuThreadExchangeStreamCaptureMode)(int*);
  int (*cuStreamCreateWithPriority)(Stream*, unsigned, int);
  int (*cuStreamDestroy_v2)(Stream);
  int (*cuStreamQuery)(Stream);
  int (*cuStreamSynchronize)(Stream);
  int (*cuStreamWriteValue64_v2)(Stream, DevicePointer, uint64_t, unsigned);
  int (*cuModuleLoadData)(ModuleHandle*, const void*);
  int (*cuModuleUnload)(ModuleHandle);
  int (*cuModuleGetFunction)(Function*, ModuleHandle, const char*);
  int (*cuFuncSetAttribute)(Function, int, int);
  int (*cuLaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                        void**);
  int (*cuLaunchKernelEx)(const LaunchConfig*, Function, void**, void**);
};

// Returns the loaded and initialised driver, or the reason why it is missing (no libcuda.so.1, no GPU, a driver that is
// too old). The first call loads it, which takes a while. A failure is not remembered.
Result<const Driver*> driver();

// Returns the driver if any code of this process has loaded it, and null otherwise: a process that has no driver has no
// GPU memory. The driver may be older than 12.0 and lack functions, or be uninitialised; no GPU memory exists in that
// case.
const Driver* loaded_driver();

// Returns an error with the driver's description of `result` (a CUresult that is not 0) of `call`.
Error cuda_error(std::string_view operation, std::string_view call, int result);
Error cuda_refused(std::string_view operation, std::string message);

// CUresult values that callers distinguish.
inline constexpr int kSuccess = 0;
inline constexpr int kInvalidValue = 1;                // CUDA_ERROR_INVALID_VALUE
inline constexpr int kNotReady = 600;                  // CUDA_ERROR_NOT_READY
inline constexpr int kPeerAccessAlreadyEnabled = 704;  // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
inline constexpr int kNotSupported = 801;              // CUDA_ERROR_NOT_SUPPORTED

// While a thread has one of these, stream captures do not affect its calls. PyTorch captures CUDA graphs in global
// mode. In that mode, an allocation, a registration of host memory or a stream query by any thread of the process fails
// with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and ruins the capture. None of our calls is meant to be captured, except
// those of StreamSignal. Objects may be nested; each takes 12 ns (H100).
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { exchange(); }

 private:
  void exchange() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }

  const Driver& driver_;
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED; during the object's life, the thread's previous mode
};

// A device's primary context. Frameworks (PyTorch's runtime API) use it too, so their pointers and streams are valid
// here. The context is retained as long as the object lives.
class Context {
 public:
  // Retains the context of the device with this ordinal among the visible devices. Creates the context if necessary.
  static Result<std::shared_ptr<Context>> retain(int device);
  Context(const Driver& driver, int device, ContextHandle handle) : driver_(driver), device_(device), handle_(handle) {}
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() {
    const RelaxedCapture relaxed(driver_);
    driver_.cuDevicePrimaryCtxRelease_v2(device_);
  }

  const Driver& driver() const noexcept { return driver_; }
  int device() const noexcept { return device_; }
  ContextHandle handle() const noexcept { return handle_; }
  std::string name() const;
  // Value of a CUdevice_attribute; 0 if the driver does not know the attribute.
  int attribute(int attribute) const;

  // Makes the context current on this thread during its life, and keeps stream captures from affecting its calls.
  class Scope {
   public:
    explicit Scope(const Context& context) : Scope(context.driver_, context.handle_) {}
    Scope(const Driver& driver, ContextHandle context) : driver_(driver), relaxed_(driver) {
      driver_.cuCtxPushCurrent_v2(context);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() {
      ContextHandle popped = nullptr;
      driver_.cuCtxPopCurrent_v2(&popped);
    }

   private:
    const Driver& driver_;
    const RelaxedCapture relaxed_;
  };

 private:
  const Driver& driver_;
  const int device_;
  const ContextHandle handle_;
};

inline constexpr int kAttributeMultiprocessors = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
inline constexpr int kAttributeMajor = 75;            // ..._COMPUTE_CAPABILITY_MAJOR
inline constexpr int kAttributeStreamWrites64 = 122;  // ..._CAN_USE_64_BIT_STREAM_MEM_OPS
inline constexpr int kAttributeFlushOptions = 117;    // ..._GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
inline constexpr int kAttributeWritesOrdering = 118;  // ..._GPU_DIRECT_RDMA_WRITES_ORDERING

// CU_POINTER_ATTRIBUTE_...
inline constexpr int kPointerMemoryType = 2;     // ..._MEMORY_TYPE
inline constexpr int kPointerSyncMemops = 6;     // ..._SYNC_MEMOPS
inline constexpr int kPointerDevice = 9;         // ..._DEVICE_ORDINAL
inline constexpr int kPointerIpcCapable = 10;    // ..._IS_LEGACY_CUDA_IPC_CAPABLE
inline constexpr int kPointerRangeStart = 11;    // ..._RANGE_START_ADDR
inline constexpr int kPointerRangeSize = 12;     // ..._RANGE_SIZE
inline constexpr int kPointerHandleTypes = 14;   // ..._ALLOWED_HANDLE_TYPES
inline constexpr int kPointerMappingSize = 18;   // ..._MAPPING_SIZE
inline constexpr int kPointerMappingStart = 19;  // ..._MAPPING_BASE_ADDR

// The CUDA context that is current on this thread. kRefused if there is none: `operation` is then for the thread of the
// forward pass. Does not block.
Result<ContextHandle> current_context(const Driver& driver, std::string_view operation);

// Whether `address` is in GPU memory. `address` may have any value.
Result<bool> is_device_memory(const Driver& driver, DevicePointer address);

// The location of a pointer.
struct Placement {
  int device = -1;  // -1: not GPU memory
  // The allocation that contains the pointer. For memory in pieces: the addresses reserved for it.
  DevicePointer allocation = 0;
  uint64_t allocation_bytes = 0;
  bool ipc_capable = false;  // whether cuIpcGetMemHandle() works on it; virtual_memory.h has another way
};
Result<Placement> placement(const Driver& driver, const void* pointer);

// Page-locked host memory that every GPU of the process can access at `device`. Allocate and free it in the same
// current context.
class PinnedMemory {
 public:
  // Allocates memory that is filled with zeros.
  static Result<PinnedMemory> allocate(const Driver& driver, size_t bytes);
  PinnedMemory() = default;
  PinnedMemory(PinnedMemory&& other) noexcept { *this = std::move(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(data_, other.data_);
    std::swap(device_, other.device_);
    return *this;
  }
  ~PinnedMemory() {
    if (data_ != nullptr) driver_->cuMemFreeHost(data_);
  }
  void* data() const noexcept { return data_; }
  DevicePointer device() const noexcept { return device_; }
  // The 64 bits at `offset`, through which the host and the GPUs report progress to each other.
  std::atomic<uint64_t>& word(size_t offset = 0) const noexcept {
    return *reinterpret_cast<std::atomic<uint64_t>*>(static_cast<std::byte*>(data_) + offset);
  }

 private:
  const Driver* driver_ = nullptr;
  void* data_ = nullptr;
  DevicePointer device_ = 0;
};

// A non-blocking stream (not ordered with the legacy default stream) of the current context.
class OwnedStream {
 public:
  enum class Priority : uint8_t { kLowest, kHighest };
  static Result<OwnedStream> create(const Driver& driver, Priority priority);
  OwnedStream() = default;
  OwnedStream(OwnedStream&& other) noexcept { *this = std::move(other); }
  OwnedStream& operator=(OwnedStream&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~OwnedStream() {
    if (stream_ != nullptr) driver_->cuStreamDestroy_v2(stream_);
  }
  Stream get() const noexcept { return stream_; }

 private:
  const Driver* driver_ = nullptr;
  Stream stream_ = nullptr;
};

// The kernels of kernels.cu, loaded into the current context.
class Module {
 public:
  // kRefused: this build holds no kernels (it was built without nvcc), or none for this GPU.
  static Result<Module> load(const Driver& driver);
  Module() = default;
  Module(Module&& other) noexcept { *this = std::move(other); }
  Module& operator=(Module&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(module_, other.module_);
    return *this;
  }
  ~Module() {
    if (module_ != nullptr) driver_->cuModuleUnload(module_);
  }
  // `shared_bytes`: dynamic shared memory that a block of the kernel may use.
  Result<Function> function(const char* name, uint32_t shared_bytes = 0) const;

 private:
  const Driver* driver_ = nullptr;
  ModuleHandle module_ = nullptr;
};

// The compiled kernels.cu in the form that the driver loads. Empty in a build without nvcc.
std::span<const unsigned char> kernel_image() noexcept;

}  // namespace kvc::cuda
