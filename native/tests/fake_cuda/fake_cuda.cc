// libcuda.so.1 for machines without a GPU: what kv-connector calls of the driver, over ordinary memory.
//
// "GPU memory" is a memfd, so that another process can map it by its IPC handle or its descriptor as CUDA maps it; a
// stream is a thread that runs one operation after the other, a little late; and the kernels of native/cuda/kernels.cu are written again in C++.
// With it the nvlink lane's links, launches, counts and fences are tested where CI runs. What it cannot show is whether
// the kernels themselves are right: that takes a GPU (the same tests run there over the real driver).
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
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
constexpr int kNotSupported = 801;
constexpr int kUnknown = 999;
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

// --- Virtual memory management (cuMemCreate, cuMemMap)

constexpr uint64_t kGranularity = 2 << 20;

// What cuMemCreate makes. Lives as long as a handle or a mapping of it.
struct Physical {
  ~Physical() { close(fd); }
  int fd = -1;
  uint64_t bytes = 0;
  int device = 0;
  bool exportable = false;
};
struct MappedPiece {
  uint64_t bytes = 0;
  std::shared_ptr<Physical> physical;  // null if it was imported: nobody asks for it again, and tests map many
  int device = 0;
  bool exportable = false;
  std::set<int> access;
};
std::map<DevicePointer, uint64_t> reservations;
std::map<DevicePointer, MappedPiece> pieces;
std::map<uint64_t, std::shared_ptr<Physical>> handles;
std::set<uint64_t> imported_handles;
uint64_t last_handle = 0;
bool imports_fail = false;

struct Location {
  int type;
  int id;
};
struct AllocationProperties {
  int type;
  int handle_types;
  Location location;
  void* unused;
  unsigned char flags[8];
};
struct Access {
  Location location;
  int flags;
};

template <typename Ranges>
auto range_of(Ranges& ranges, DevicePointer pointer, uint64_t (*bytes)(const typename Ranges::mapped_type&)) {
  auto found = ranges.upper_bound(pointer);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return pointer - found->first < bytes(found->second) ? found : ranges.end();
}
auto find_piece(DevicePointer pointer) {
  return range_of(pieces, pointer, [](const MappedPiece& piece) { return piece.bytes; });
}
auto find_reservation(DevicePointer pointer) {
  return range_of(reservations, pointer, [](const uint64_t& bytes) { return bytes; });
}

// The pieces that begin and end at the ends of a range and fill it; none if they do not.
std::vector<DevicePointer> pieces_in(DevicePointer pointer, size_t bytes) {
  std::vector<DevicePointer> found;
  for (DevicePointer at = pointer; at != pointer + bytes;) {
    const auto piece = pieces.find(at);
    if (piece == pieces.end() || piece->second.bytes > pointer + bytes - at) return {};
    found.push_back(at);
    at += piece->second.bytes;
  }
  return found;
}

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

std::atomic<bool> copies_held{false};
std::atomic<int> copies_waiting{0};

void copy_pages(const CopyLaunch& launch) {
  ++copies_waiting;
  copies_held.wait(true);
  --copies_waiting;
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
KVC_API int cuMemHostRegister_v2(void*, size_t, unsigned) { return current.empty() ? kInvalidContext : kSuccess; }
KVC_API int cuMemHostUnregister(void*) { return kSuccess; }
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
struct Attributes {
  int device = 0;
  int capable = 0;  // of legacy IPC
  DevicePointer range = 0;
  size_t range_bytes = 0;
  uint64_t handle_types = 0;
  size_t mapping_bytes = 0;
  DevicePointer mapping = 0;
};
// With the mutex held. False: nothing is known of it.
static bool describe(DevicePointer pointer, Attributes& found) {
  if (const auto piece = find_piece(pointer); piece != pieces.end()) {
    const auto& [reserved, reserved_bytes] = *find_reservation(pointer);
    found = {piece->second.device, 0,           reserved, reserved_bytes, piece->second.exportable ? 1U : 0U,
             piece->second.bytes,  piece->first};
    return true;
  }
  const auto allocation = find(pointer);
  if (allocation == allocations.end()) return false;
  const auto& [address, memory] = *allocation;
  found = {memory.device, memory.capable, address, memory.bytes, 0, memory.bytes, address};
  return true;
}
KVC_API int cuPointerGetAttribute(void* value, int attribute, DevicePointer pointer) {
  const std::lock_guard lock(mutex);
  Attributes found;
  if (!describe(pointer, found)) return kInvalidValue;
  switch (attribute) {
    case 2:
      *static_cast<unsigned*>(value) = 2;
      return kSuccess;
    case 9:
      *static_cast<int*>(value) = found.device;
      return kSuccess;
    case 10:
      *static_cast<int*>(value) = found.capable;
      return kSuccess;
    case 11:
      *static_cast<DevicePointer*>(value) = found.range;
      return kSuccess;
    case 12:
      *static_cast<size_t*>(value) = found.range_bytes;
      return kSuccess;
    case 14:
      *static_cast<uint64_t*>(value) = found.handle_types;
      return kSuccess;
    case 18:
      *static_cast<size_t*>(value) = found.mapping_bytes;
      return kSuccess;
    case 19:
      *static_cast<DevicePointer*>(value) = found.mapping;
      return kSuccess;
    default:
      return kInvalidValue;
  }
}
// Not of the driver: copies that have not begun wait until they are let go, as on a GPU whose kernels leave them no room.
KVC_API int fakeHoldCopies(int hold) {
  copies_held = hold != 0;
  copies_held.notify_all();
  return kSuccess;
}
// Not of the driver: how many do.
KVC_API int fakeHeldCopies() { return copies_held ? copies_waiting.load() : 0; }
// Not of the driver: makes an allocation one that cannot be shared, as those of a memory pool are.
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
KVC_API int cuMemGetAllocationGranularity(size_t* granularity, const AllocationProperties*, int) {
  *granularity = kGranularity;
  return kSuccess;
}
KVC_API int cuMemCreate(uint64_t* handle, size_t bytes, const AllocationProperties* properties, unsigned long long) {
  if (bytes == 0 || bytes % kGranularity != 0) return kInvalidValue;
  auto physical = std::make_shared<Physical>();
  physical->fd = memfd_create("fake-gpu-piece", MFD_CLOEXEC);
  if (physical->fd < 0 || ftruncate(physical->fd, static_cast<off_t>(bytes)) != 0) return 2;
  physical->bytes = bytes;
  physical->device = properties->location.id;
  physical->exportable = (properties->handle_types & 1) != 0;
  const std::lock_guard lock(mutex);
  handles[*handle = ++last_handle] = std::move(physical);
  return kSuccess;
}
KVC_API int cuMemRelease(uint64_t handle) {
  const std::lock_guard lock(mutex);
  imported_handles.erase(handle);
  return handles.erase(handle) == 1 ? kSuccess : kInvalidValue;
}
KVC_API int cuMemAddressReserve(DevicePointer* pointer, size_t bytes, size_t, DevicePointer, unsigned long long) {
  if (bytes == 0 || bytes % 4096 != 0) return kInvalidValue;
  void* data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return 2;
  const std::lock_guard lock(mutex);
  reservations[*pointer = reinterpret_cast<DevicePointer>(data)] = bytes;
  return kSuccess;
}
KVC_API int cuMemAddressFree(DevicePointer pointer, size_t bytes) {
  const std::lock_guard lock(mutex);
  const auto found = reservations.find(pointer);
  if (found == reservations.end() || found->second != bytes) return kInvalidValue;
  const auto piece = pieces.lower_bound(pointer);
  if (piece != pieces.end() && piece->first < pointer + bytes) return kInvalidValue;
  reservations.erase(found);
  return munmap(reinterpret_cast<void*>(pointer), bytes) == 0 ? kSuccess : kInvalidValue;
}
KVC_API int cuMemMap(DevicePointer pointer, size_t bytes, size_t offset, uint64_t handle, unsigned long long) {
  const std::lock_guard lock(mutex);
  const auto found = handles.find(handle);
  const auto reserved = find_reservation(pointer);
  if (found == handles.end() || reserved == reservations.end()) return kInvalidValue;
  if (bytes > reserved->second - (pointer - reserved->first) || find_piece(pointer) != pieces.end())
    return kInvalidValue;
  const std::shared_ptr<Physical>& physical = found->second;
  if (offset != 0 || bytes != physical->bytes) return kNotSupported;  // as driver 580 says
  void* data = mmap(reinterpret_cast<void*>(pointer), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->fd, 0);
  if (data == MAP_FAILED) return 2;
  const bool imported = imported_handles.contains(handle);
  pieces[pointer] = {bytes, imported ? nullptr : physical, physical->device, physical->exportable, {}};
  return kSuccess;
}
KVC_API int cuMemUnmap(DevicePointer pointer, size_t bytes) {
  const std::lock_guard lock(mutex);
  const std::vector<DevicePointer> found = pieces_in(pointer, bytes);
  if (found.empty()) return kInvalidValue;
  mmap(reinterpret_cast<void*>(pointer), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
  for (const DevicePointer piece : found) pieces.erase(piece);
  return kSuccess;
}
KVC_API int cuMemSetAccess(DevicePointer pointer, size_t bytes, const Access* access, size_t count) {
  const std::lock_guard lock(mutex);
  const std::vector<DevicePointer> found = pieces_in(pointer, bytes);
  if (found.empty()) return kInvalidValue;
  for (size_t i = 0; i < count; ++i) {
    if (access[i].location.type != 1 || access[i].location.id >= kDevices || access[i].flags != 3) return kInvalidValue;
    for (const DevicePointer piece : found) pieces[piece].access.insert(access[i].location.id);
  }
  return mprotect(reinterpret_cast<void*>(pointer), bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kInvalidValue;
}
KVC_API int cuMemGetAccess(unsigned long long* flags, const Location* location, DevicePointer pointer) {
  const std::lock_guard lock(mutex);
  const auto found = find_piece(pointer);
  if (found == pieces.end()) return kInvalidValue;
  *flags = found->second.access.contains(location->id) ? 3 : 0;
  return kSuccess;
}
KVC_API int cuMemRetainAllocationHandle(uint64_t* handle, void* pointer) {
  const std::lock_guard lock(mutex);
  const auto found = find_piece(reinterpret_cast<DevicePointer>(pointer));
  if (found == pieces.end() || !found->second.physical) return kInvalidValue;
  handles[*handle = ++last_handle] = found->second.physical;
  return kSuccess;
}
KVC_API int cuMemExportToShareableHandle(int* descriptor, uint64_t handle, int type, unsigned long long) {
  const std::lock_guard lock(mutex);
  const auto found = handles.find(handle);
  if (found == handles.end() || !found->second->exportable || type != 1) return kInvalidValue;
  *descriptor = fcntl(found->second->fd, F_DUPFD_CLOEXEC, 0);
  return *descriptor >= 0 ? kSuccess : 2;
}
KVC_API int cuMemImportFromShareableHandle(uint64_t* handle, void* descriptor, int type) {
  const auto fd = static_cast<int>(reinterpret_cast<intptr_t>(descriptor));
  struct stat status{};
  if (type != 1 || fcntl(fd, F_GET_SEALS) < 0 || fstat(fd, &status) != 0) return kUnknown;
  const std::lock_guard lock(mutex);
  if (imports_fail) return kNotSupported;
  auto physical = std::make_shared<Physical>();
  physical->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  physical->bytes = static_cast<uint64_t>(status.st_size);
  handles[*handle = ++last_handle] = std::move(physical);
  imported_handles.insert(*handle);
  return kSuccess;
}
// Not of the driver: nothing can be imported from now on (or again), as on a GPU without peer access.
KVC_API int fakeFailImports(int fail) {
  const std::lock_guard lock(mutex);
  imports_fail = fail != 0;
  return kSuccess;
}
// Not of the driver: how many pieces are mapped in this process.
KVC_API int fakeMappedPieces() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(pieces.size());
}
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
