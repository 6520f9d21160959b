// libcuda.so.1 for machines without a GPU: what kv-connector calls of the driver, over ordinary memory.
//
// "GPU memory" is a memfd, so that another process can map it by its IPC handle as CUDA maps it; a stream is a thread that
// runs one operation after the other, a little late; and the kernels of native/cuda/kernels.cu are written again in C++.
// With it the nvlink lane's links, launches, counts and fences are tested where CI runs. What it cannot show is whether
// the kernels themselves are right: that takes a GPU (the same tests run there over the real driver).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "cuda/kernels.h"

#define KVC_API extern "C" __attribute__((visibility("default")))

namespace {

using kvc::cuda::CopyLaunch;
using DevicePointer = unsigned long long;

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;
constexpr int kNotReady = 600;
constexpr int kDevices = 2;

struct Allocation {
  uint64_t bytes = 0;
  int fd = -1;
  int device = 0;
  bool imported = false;
  bool capable = true;
};
std::mutex mutex;
std::map<DevicePointer, Allocation> allocations;  // by address, this process's and mapped ones

struct Handle {
  int pid;
  int fd;
  uint64_t bytes;
  char padding[48];
};
static_assert(sizeof(Handle) == 64);

int contexts[kDevices];  // their addresses are the handles
thread_local std::vector<int*> current;

class FakeStream {
 public:
  FakeStream() : thread_([this] { run(); }) {}
  ~FakeStream() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }
  void push(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    ++pushed_;
    changed_.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return done_ == pushed_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ == pushed_; });
  }

 private:
  void run() {
    std::mt19937 random(42);
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 30));
      work();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t pushed_ = 0;
  uint64_t done_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

FakeStream& stream_of(void* stream) {
  static auto* legacy = new FakeStream;
  return stream != nullptr ? *static_cast<FakeStream*>(stream) : *legacy;
}

std::map<DevicePointer, Allocation>::iterator find(DevicePointer pointer) {
  auto found = allocations.upper_bound(pointer);
  if (found == allocations.begin()) return allocations.end();
  --found;
  return pointer < found->first + found->second.bytes ? found : allocations.end();
}

void copy_pages(const CopyLaunch& launch) {
  for (uint32_t unit = 0; unit < launch.units; ++unit) {
    const kvc::cuda::PageCopy& page = launch.pages[unit / launch.units_per_page];
    const uint64_t offset = static_cast<uint64_t>(unit % launch.units_per_page) * kvc::cuda::kUnitBytes;
    const uint64_t bytes = std::min<uint64_t>(kvc::cuda::kUnitBytes, launch.page_bytes - offset);
    std::memcpy(reinterpret_cast<void*>(page.target + offset), reinterpret_cast<const void*>(page.source + offset),
                bytes);
  }
  reinterpret_cast<std::atomic<uint64_t>*>(launch.finished)->store(launch.sequence);
}

const char* const kKernels[] = {"kvc_copy_bulk", "kvc_copy_vector", "kvc_signal_store", "kvc_signal_advance"};

}  // namespace

KVC_API int cuInit(unsigned) { return kSuccess; }
KVC_API int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
KVC_API int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_FAKE";
  return kSuccess;
}
KVC_API int cuGetErrorString(int, const char** words) {
  *words = "of the stand-in driver";
  return kSuccess;
}
KVC_API int cuDeviceGetCount(int* count) {
  *count = kDevices;
  return kSuccess;
}
KVC_API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < kDevices ? kSuccess : 101;
}
KVC_API int cuDeviceGetName(char* name, int bytes, int) {
  std::snprintf(name, static_cast<size_t>(bytes), "stand-in GPU");
  return kSuccess;
}
KVC_API int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 9 : attribute == 16 ? 4 : attribute == 122 ? 1 : 0;
  return kSuccess;
}
KVC_API int cuDevicePrimaryCtxRetain(int** context, int device) {
  *context = &contexts[device];
  return kSuccess;
}
KVC_API int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
KVC_API int cuCtxGetCurrent(int** context) {
  *context = current.empty() ? nullptr : current.back();
  return kSuccess;
}
KVC_API int cuCtxGetDevice(int* device) {
  if (current.empty()) return kInvalidContext;
  *device = static_cast<int>(current.back() - contexts);
  return kSuccess;
}
KVC_API int cuCtxPushCurrent_v2(int* context) {
  current.push_back(context);
  return kSuccess;
}
KVC_API int cuCtxPopCurrent_v2(int** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kSuccess;
}
KVC_API int cuCtxGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return kSuccess;
}
KVC_API int cuCtxEnablePeerAccess(int*, unsigned) { return kSuccess; }
KVC_API int cuCtxSynchronize() { return kSuccess; }
KVC_API int cuMemAlloc_v2(DevicePointer* pointer, size_t bytes) {
  if (current.empty()) return kInvalidContext;
  const int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return 2;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return 2;
  *pointer = reinterpret_cast<DevicePointer>(data);
  const std::lock_guard lock(mutex);
  allocations[*pointer] = {bytes, fd, static_cast<int>(current.back() - contexts), false, true};
  return kSuccess;
}
KVC_API int cuMemFree_v2(DevicePointer pointer) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(pointer);
  if (found == allocations.end()) return kInvalidValue;
  munmap(reinterpret_cast<void*>(pointer), found->second.bytes);
  close(found->second.fd);
  allocations.erase(found);
  return kSuccess;
}
KVC_API int cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (current.empty()) return kInvalidContext;
  *pointer = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *pointer != nullptr ? kSuccess : 2;
}
KVC_API int cuMemFreeHost(void* pointer) {
  std::free(pointer);
  return kSuccess;
}
KVC_API int cuMemHostGetDevicePointer_v2(DevicePointer* device, void* pointer, unsigned) {
  *device = reinterpret_cast<DevicePointer>(pointer);
  return kSuccess;
}
KVC_API int cuMemcpyHtoD_v2(DevicePointer target, const void* source, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(target), source, bytes);
  return kSuccess;
}
KVC_API int cuMemcpyDtoH_v2(void* target, DevicePointer source, size_t bytes) {
  std::memcpy(target, reinterpret_cast<const void*>(source), bytes);
  return kSuccess;
}
KVC_API int cuMemcpyDtoDAsync_v2(DevicePointer target, DevicePointer source, size_t bytes, void* stream) {
  stream_of(stream).push(
      [=] { std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes); });
  return kSuccess;
}
KVC_API int cuMemsetD8_v2(DevicePointer target, unsigned char value, size_t bytes) {
  std::memset(reinterpret_cast<void*>(target), value, bytes);
  return kSuccess;
}
KVC_API int cuPointerGetAttribute(void* value, int attribute, DevicePointer pointer) {
  const std::lock_guard lock(mutex);
  const auto found = find(pointer);
  if (found == allocations.end()) return kInvalidValue;
  switch (attribute) {
    case 2:
      *static_cast<unsigned*>(value) = 2;
      return kSuccess;
    case 9:
      *static_cast<int*>(value) = found->second.device;
      return kSuccess;
    case 10:
      *static_cast<int*>(value) = found->second.capable;
      return kSuccess;
    case 11:
      *static_cast<DevicePointer*>(value) = found->first;
      return kSuccess;
    case 12:
      *static_cast<size_t*>(value) = found->second.bytes;
      return kSuccess;
    default:
      return kInvalidValue;
  }
}
// Not of the driver: makes an allocation one that cannot be shared, as expandable segments are.
KVC_API int fakeForbidSharing(DevicePointer pointer) {
  const std::lock_guard lock(mutex);
  allocations[pointer].capable = false;
  return kSuccess;
}
KVC_API int cuIpcGetMemHandle(Handle* handle, DevicePointer pointer) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(pointer);
  if (found == allocations.end() || !found->second.capable) return kInvalidValue;
  *handle = {getpid(), found->second.fd, found->second.bytes, {}};
  return kSuccess;
}
KVC_API int cuIpcOpenMemHandle_v2(DevicePointer* pointer, Handle handle, unsigned) {
  if (current.empty() || handle.pid == getpid()) return kInvalidContext;
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.pid, handle.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidValue;
  void* data = mmap(nullptr, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return kInvalidValue;
  *pointer = reinterpret_cast<DevicePointer>(data);
  const std::lock_guard lock(mutex);
  allocations[*pointer] = {handle.bytes, fd, static_cast<int>(current.back() - contexts), true, false};
  return kSuccess;
}
KVC_API int cuIpcCloseMemHandle(DevicePointer pointer) { return cuMemFree_v2(pointer); }
KVC_API int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  *stream = new FakeStream;
  return kSuccess;
}
KVC_API int cuStreamDestroy_v2(void* stream) {
  stream_of(stream).wait();
  delete static_cast<FakeStream*>(stream);
  return kSuccess;
}
KVC_API int cuStreamQuery(void* stream) { return stream_of(stream).idle() ? kSuccess : kNotReady; }
KVC_API int cuStreamSynchronize(void* stream) {
  stream_of(stream).wait();
  return kSuccess;
}
KVC_API int cuStreamWriteValue64_v2(void* stream, DevicePointer word, uint64_t value, unsigned) {
  stream_of(stream).push([=] { reinterpret_cast<std::atomic<uint64_t>*>(word)->store(value); });
  return kSuccess;
}
KVC_API int cuEventCreate(void**, unsigned) { return kInvalidValue; }
KVC_API int cuEventDestroy_v2(void*) { return kInvalidValue; }
KVC_API int cuEventRecord(void*, void*) { return kInvalidValue; }
KVC_API int cuEventElapsedTime(float*, void*, void*) { return kInvalidValue; }
KVC_API int cuModuleLoadData(void** module, const void*) {
  *module = &contexts;
  return kSuccess;
}
KVC_API int cuModuleUnload(void*) { return kSuccess; }
KVC_API int cuModuleGetFunction(const void** function, void*, const char* name) {
  for (const auto& kernel : kKernels) {
    if (std::strcmp(kernel, name) != 0) continue;
    *function = &kernel;
    return kSuccess;
  }
  return 500;
}
KVC_API int cuFuncSetAttribute(void*, int, int) { return kSuccess; }
KVC_API int cuLaunchKernel(const void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           void* stream, void** arguments, void**) {
  const auto kernel = static_cast<const char* const*>(function) - kKernels;
  if (kernel <= 1) {
    const CopyLaunch launch = *static_cast<const CopyLaunch*>(arguments[0]);
    stream_of(stream).push([launch] { copy_pages(launch); });
    return kSuccess;
  }
  auto* word = *static_cast<std::atomic<uint64_t>**>(arguments[0]);
  const uint64_t value = *static_cast<const uint64_t*>(arguments[1]);
  stream_of(stream).push([=] { word->store(kernel == 2 ? value : word->load() + 1); });
  return kSuccess;
}
