// libcuda.so.1 for machines without a GPU: the driver calls that kv-connector uses, over ordinary memory.
//
// "GPU memory" is a memfd. Another process can map it by its IPC handle or its descriptor, as with CUDA. A stream is a
// thread that runs one operation after the other, with a small delay. The kernels of native/cuda/kernels.cu are
// rewritten in C++. The nvlink lane's links, launches, counts and fences can thus be tested in CI. Only a GPU can test
// the kernels themselves (the same tests run there over the real driver). The stand-in is stricter than the real driver
// in cases that the driver leaves undefined. For example, freeing memory that another process maps by its IPC handle
// ends this process.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/page_sum.h"
#include "cuda/kernels.h"
#include "moe/cpu_exchange.h"

#define KVC_API extern "C" __attribute__((visibility("default")))

namespace {

using kvc::cuda::CopyLaunch;
using DevicePointer = unsigned long long;

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;
constexpr int kNotReady = 600;
constexpr int kLaunchFailed = 719;
constexpr int kNotSupported = 801;
constexpr int kCaptureUnsupported = 900;
constexpr int kCaptureInvalidated = 901;
constexpr int kUnknown = 999;
constexpr int kDevices = 2;

struct Handle {
  int pid;
  int fd;
  uint64_t bytes;
  uint64_t inode;  // of the memfd: another memfd may have its number by now
  char padding[40];
};
static_assert(sizeof(Handle) == 64);

struct Allocation {
  uint64_t bytes = 0;
  int fd = -1;
  int device = 0;
  bool capable = true;
  unsigned synchronous = 0;
  uint32_t opened = 0;  // number of opens, if it is another process's memory
  Handle handle{};      // the handle by which it was opened
};
std::mutex mutex;
std::map<DevicePointer, Allocation> allocations;  // by address: this process's own and mapped ones

// --- Virtual memory management (cuMemCreate, cuMemMap)

constexpr uint64_t kGranularity = 2 << 20;

// Memory of cuMemCreate. It lives as long as a handle or a mapping of it.
struct Physical {
  ~Physical() { close(fd); }
  int fd = -1;
  uint64_t bytes = 0;
  int device = 0;
  bool exportable = false;
};
struct MappedPiece {
  uint64_t bytes = 0;
  std::shared_ptr<Physical> physical;  // null for imported memory, which is not exported again
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

// The pieces that fill a range exactly. Empty if their ends do not match the range.
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

int contexts[kDevices];  // their addresses are the handles
unsigned context_flags[kDevices];
thread_local std::vector<int*> current;
int device_of_current() { return static_cast<int>(current.back() - contexts); }

// --- IPC mappings. Each mapping locks one of these bytes of the memfd. The owner can therefore count the mappings, and
// a killed process loses its own.

constexpr int kMaxMappings = 64;

struct flock byte_lock(int index) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_start = index;
  lock.l_len = 1;
  return lock;
}
bool take_mapping_lock(int fd) {
  for (int i = 0; i < kMaxMappings; ++i) {
    struct flock lock = byte_lock(i);
    if (fcntl(fd, F_OFD_SETLK, &lock) == 0) return true;
  }
  return false;
}
int count_mappings(int fd) {
  int count = 0;
  for (int i = 0; i < kMaxMappings; ++i) {
    struct flock lock = byte_lock(i);
    if (fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK) ++count;
  }
  return count;
}

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
std::mutex streams_mutex;
std::set<FakeStream*> streams;  // all but the legacy stream

// --- Stream capture

constexpr int kCaptureGlobal = 0;
constexpr int kCaptureRelaxed = 2;

struct Capture {
  std::thread::id thread;
  int mode = kCaptureGlobal;
  bool invalid = false;
  std::vector<std::function<void()>> operations;
};
using Graph = std::vector<std::function<void()>>;
std::map<void*, Capture> captures;  // by stream
thread_local int thread_mode = kCaptureGlobal;

// Called when the thread does something that is potentially unsafe while a stream is captured. Returns true if it must
// not, and the capture is ruined. The affected calls were determined on an H100 with driver 580.
bool ruins_capture() {
  if (thread_mode == kCaptureRelaxed) return false;
  const std::lock_guard lock(mutex);
  bool ruined = false;
  for (auto& [stream, capture] : captures) {
    const bool own = capture.thread == std::this_thread::get_id() && capture.mode != kCaptureRelaxed;
    if (!own && !(thread_mode == kCaptureGlobal && capture.mode == kCaptureGlobal)) continue;
    ruined = capture.invalid = true;
  }
  return ruined;
}

// Adds an operation to the stream, or to the capture of it.
int enqueue(void* stream, std::function<void()> operation) {
  {
    const std::lock_guard lock(mutex);
    if (const auto found = captures.find(stream); found != captures.end()) {
      if (found->second.invalid) return kCaptureInvalidated;
      found->second.operations.push_back(std::move(operation));
      return kSuccess;
    }
  }
  stream_of(stream).push(std::move(operation));
  return kSuccess;
}

std::map<DevicePointer, Allocation>::iterator find(DevicePointer pointer) {
  auto found = allocations.upper_bound(pointer);
  if (found == allocations.begin()) return allocations.end();
  --found;
  return pointer < found->first + found->second.bytes ? found : allocations.end();
}

enum Held : int { kHoldsNone, kHoldsAll, kHoldsKernels };
std::atomic<int> copies_held{kHoldsNone};
std::atomic<int> copies_waiting{0};
std::atomic<int> waiting_for_streams{0};
std::atomic<bool> broken{false};
std::atomic<int> breaks{0};
std::atomic<bool> own_handles{false};
std::atomic<int> writes_ordering{100};
std::atomic<int> flush_options{1};
std::atomic<int> flushes{0};

// Waits while copies are held.
void begin_copy(bool kernel) {
  ++copies_waiting;
  for (int held = copies_held; held == kHoldsAll || (held == kHoldsKernels && kernel); held = copies_held) {
    copies_held.wait(held);
  }
  --copies_waiting;
}

// In the kernel's order of additions, which differs from that of kvc::sum_pages().
void sum_by_kernel(const kvc::PageSums& pages) {
  const uint64_t run_words = (pages.run_bytes + 7) / 8;
  for (uint64_t page = 0; page < uint64_t{pages.layer_count} * pages.block_count; ++page) {
    const uint64_t base =
        pages.layers[page / pages.block_count] + pages.blocks[page % pages.block_count] * pages.stride;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < pages.run_count * run_words; ++i) {
      const uint64_t offset = i % run_words * 8;
      uint64_t word = 0;
      std::memcpy(&word, reinterpret_cast<const void*>(base + pages.runs[i / run_words] + offset),
                  std::min<uint64_t>(8, pages.run_bytes - offset));
      sum += kvc::mix_word(word, (i + 1) * kvc::kWordStep);
    }
    pages.sums[page] = sum;
  }
}

// `breaks_before`: number of breakdowns of the GPU before the launch.
void copy_pages(const CopyLaunch& launch, int breaks_before) {
  begin_copy(true);
  if (breaks != breaks_before) return;
  for (uint32_t unit = 0; unit < launch.units; ++unit) {
    const kvc::cuda::PageCopy& page = launch.pages[unit / launch.units_per_page];
    const uint64_t offset = static_cast<uint64_t>(unit % launch.units_per_page) * kvc::cuda::kUnitBytes;
    const uint64_t bytes = std::min<uint64_t>(kvc::cuda::kUnitBytes, launch.page_bytes - offset);
    std::memcpy(reinterpret_cast<void*>(page.target + offset), reinterpret_cast<const void*>(page.source + offset),
                bytes);
  }
  reinterpret_cast<std::atomic<uint64_t>*>(launch.finished)->store(launch.sequence);
}

const char* const kKernels[] = {"kvc_copy_bulk",         "kvc_copy_vector",       "kvc_signal_store",
                                "kvc_signal_advance",    "kvc_moe_dispatch",      "kvc_moe_combine_v1_r2",
                                "kvc_moe_combine_v1_r4", "kvc_moe_combine_v1_r8", "kvc_moe_combine_v2_r2",
                                "kvc_moe_combine_v2_r4", "kvc_moe_combine_v2_r8", "kvc_page_sums"};
constexpr int kPageSums = std::size(kKernels) - 1;

struct CopyAttributes {
  int source_order;
  Location hints[2];
  unsigned flags;
};

// Copies words that the host may read while a stream still writes them, as in GPU memory.
template <typename Word>
void copy_by(void* target, const void* source, size_t bytes) {
  auto* to = static_cast<Word*>(target);
  auto* from = static_cast<Word*>(const_cast<void*>(source));
  for (size_t i = 0; i < bytes / sizeof(Word); ++i) {
    std::atomic_ref(to[i]).store(std::atomic_ref(from[i]).load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
}
void copy_bytes(void* target, const void* source, size_t bytes) {
  const auto places = reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(source) | bytes;
  places % sizeof(uint64_t) == 0 ? copy_by<uint64_t>(target, source, bytes) : copy_by<uint8_t>(target, source, bytes);
}

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
  switch (attribute) {
    case 16:
      *value = 4;
      return kSuccess;
    case 75:
      *value = 9;
      return kSuccess;
    case 117:
      *value = flush_options;
      return kSuccess;
    case 118:
      *value = writes_ordering;
      return kSuccess;
    case 122:
      *value = 1;
      return kSuccess;
    default:
      *value = 0;
      return kSuccess;
  }
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
  *device = device_of_current();
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
KVC_API int cuCtxGetFlags(unsigned* flags) {
  if (current.empty()) return kInvalidContext;
  *flags = context_flags[device_of_current()];
  return kSuccess;
}
KVC_API int cuCtxSetFlags(unsigned flags) {
  if (current.empty()) return kInvalidContext;
  context_flags[device_of_current()] = flags;
  return kSuccess;
}
// Never allowed while a stream is captured, in any mode.
KVC_API int cuCtxSynchronize() {
  {
    const std::lock_guard lock(mutex);
    for (auto& [stream, capture] : captures) capture.invalid = true;
    if (!captures.empty()) return kCaptureUnsupported;
  }
  stream_of(nullptr).wait();
  const std::lock_guard lock(streams_mutex);
  for (FakeStream* stream : streams) stream->wait();
  return kSuccess;
}
KVC_API int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, thread_mode);
  return kSuccess;
}
KVC_API int cuStreamBeginCapture_v2(void* stream, int mode) {
  const std::lock_guard lock(mutex);
  const auto [capture, fresh] = captures.try_emplace(stream);
  capture->second.thread = std::this_thread::get_id();
  capture->second.mode = mode;
  return fresh ? kSuccess : kInvalidValue;
}
KVC_API int cuStreamIsCapturing(void* stream, int* status) {
  const std::lock_guard lock(mutex);
  const auto found = captures.find(stream);
  *status = found == captures.end() ? 0 : found->second.invalid ? 2 : 1;
  return kSuccess;
}
KVC_API int cuStreamEndCapture(void* stream, Graph** graph) {
  const std::lock_guard lock(mutex);
  const auto capture = captures.extract(stream);
  *graph = nullptr;
  if (!capture) return kInvalidValue;
  if (capture.mapped().invalid) return kCaptureInvalidated;
  *graph = new Graph(capture.mapped().operations);
  return kSuccess;
}
KVC_API int cuGraphInstantiateWithFlags(Graph** executable, Graph* graph, unsigned long long) {
  *executable = new Graph(*graph);
  return kSuccess;
}
KVC_API int cuGraphLaunch(Graph* executable, void* stream) {
  for (const auto& operation : *executable) stream_of(stream).push(operation);
  return kSuccess;
}
KVC_API int cuGraphExecDestroy(Graph* executable) {
  delete executable;
  return kSuccess;
}
KVC_API int cuGraphDestroy(Graph* graph) {
  delete graph;
  return kSuccess;
}
KVC_API int cuMemAlloc_v2(DevicePointer* pointer, size_t bytes) {
  if (current.empty()) return kInvalidContext;
  if (ruins_capture()) return kCaptureUnsupported;
  const int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return 2;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return 2;
  *pointer = reinterpret_cast<DevicePointer>(data);
  const std::lock_guard lock(mutex);
  allocations[*pointer] = {.bytes = bytes, .fd = fd, .device = device_of_current()};
  return kSuccess;
}
// The caller holds the mutex.
static void end_allocation(std::map<DevicePointer, Allocation>::iterator allocation) {
  munmap(reinterpret_cast<void*>(allocation->first), allocation->second.bytes);
  close(allocation->second.fd);
  allocations.erase(allocation);
}
KVC_API int cuMemFree_v2(DevicePointer pointer) {
  if (ruins_capture()) return kCaptureUnsupported;
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(pointer);
  if (found == allocations.end() || found->second.opened > 0) return kInvalidValue;
  if (const int mappings = count_mappings(found->second.fd); mappings > 0) {
    std::fprintf(stderr, "fake_cuda: memory is freed that %d others have mapped by its IPC handle\n", mappings);
    std::abort();
  }
  end_allocation(found);
  return kSuccess;
}
KVC_API int cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (current.empty()) return kInvalidContext;
  if (ruins_capture()) return kCaptureUnsupported;
  *pointer = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *pointer != nullptr ? kSuccess : 2;
}
KVC_API int cuMemFreeHost(void* pointer) {
  if (ruins_capture()) return kCaptureUnsupported;
  std::free(pointer);
  return kSuccess;
}
KVC_API int cuMemHostRegister_v2(void*, size_t, unsigned) {
  if (current.empty()) return kInvalidContext;
  return ruins_capture() ? kCaptureUnsupported : kSuccess;
}
KVC_API int cuMemHostUnregister(void*) { return ruins_capture() ? kCaptureUnsupported : kSuccess; }
KVC_API int cuMemHostGetDevicePointer_v2(DevicePointer* device, void* pointer, unsigned) {
  *device = reinterpret_cast<DevicePointer>(pointer);
  return kSuccess;
}
KVC_API int cuMemcpyHtoD_v2(DevicePointer target, const void* source, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(target), source, bytes);
  return kSuccess;
}
KVC_API int cuMemcpyDtoH_v2(void* target, DevicePointer source, size_t bytes) {
  if (bytes == sizeof(uint64_t)) {  // a word, which a stream may write meanwhile
    *static_cast<uint64_t*>(target) = reinterpret_cast<const std::atomic<uint64_t>*>(source)->load();
    return kSuccess;
  }
  copy_bytes(target, reinterpret_cast<const void*>(source), bytes);
  return kSuccess;
}
KVC_API int cuMemcpyDtoDAsync_v2(DevicePointer target, DevicePointer source, size_t bytes, void* stream) {
  return enqueue(stream,
                 [=] { std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes); });
}
KVC_API int cuMemcpyBatchAsync(DevicePointer* targets, DevicePointer* sources, size_t* bytes, size_t count,
                               CopyAttributes* attributes, size_t* first, size_t attribute_count, size_t* failed,
                               void* stream) {
  *failed = SIZE_MAX;
  if (broken) return kLaunchFailed;
  if (current.empty()) return kInvalidContext;
  if (count == 0 || stream == nullptr || attribute_count != 1 || *first != 0 || attributes->source_order != 1) {
    return kInvalidValue;
  }
  const std::vector<DevicePointer> to(targets, targets + count);
  const std::vector<DevicePointer> from(sources, sources + count);
  const std::vector<size_t> lengths(bytes, bytes + count);
  return enqueue(stream, [to, from, lengths, before = breaks.load()] {
    begin_copy(false);
    if (breaks != before) return;
    for (size_t i = 0; i < to.size(); ++i) {
      copy_bytes(reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]), lengths[i]);
    }
  });
}
KVC_API int cuMemsetD8_v2(DevicePointer target, unsigned char value, size_t bytes) {
  std::memset(reinterpret_cast<void*>(target), value, bytes);
  return kSuccess;
}
struct Attributes {
  int device = 0;
  int capable = 0;  // whether legacy IPC is possible
  DevicePointer range = 0;
  size_t range_bytes = 0;
  uint64_t handle_types = 0;
  size_t mapping_bytes = 0;
  DevicePointer mapping = 0;
  unsigned synchronous = 0;
};
// The caller holds the mutex. Returns false if the pointer is unknown.
static bool describe(DevicePointer pointer, Attributes& found) {
  if (const auto piece = find_piece(pointer); piece != pieces.end()) {
    const auto& [reserved, reserved_bytes] = *find_reservation(pointer);
    found = {piece->second.device, 0, reserved, reserved_bytes, piece->second.exportable ? 1U : 0U, piece->second.bytes,
             piece->first,         0};
    return true;
  }
  const auto allocation = find(pointer);
  if (allocation == allocations.end()) return false;
  const auto& [address, memory] = *allocation;
  found = {memory.device, memory.capable, address, memory.bytes, 0, memory.bytes, address, memory.synchronous};
  return true;
}
KVC_API int cuPointerGetAttribute(void* value, int attribute, DevicePointer pointer) {
  const std::lock_guard lock(mutex);
  Attributes found;
  if (!describe(pointer, found)) return kInvalidValue;
  switch (attribute) {
    case 6:
      *static_cast<unsigned*>(value) = found.synchronous;
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
// Only CU_POINTER_ATTRIBUTE_MEMORY_TYPE. The singular call above fails for memory that is not a GPU's.
KVC_API int cuPointerGetAttributes(unsigned count, int* attributes, void** values, DevicePointer pointer) {
  const std::lock_guard lock(mutex);
  if (count != 1 || attributes[0] != 2) return kInvalidValue;
  Attributes found;
  *static_cast<unsigned*>(values[0]) = describe(pointer, found) ? 2 : 0;
  return kSuccess;
}
// Only CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, which memory in pieces does not have.
KVC_API int cuPointerSetAttribute(const void* value, int attribute, DevicePointer pointer) {
  if (ruins_capture()) return kCaptureUnsupported;
  const std::lock_guard lock(mutex);
  if (find_piece(pointer) != pieces.end()) return kNotSupported;
  const auto found = find(pointer);
  if (found == allocations.end() || attribute != 6) return kInvalidValue;
  found->second.synchronous = *static_cast<const unsigned*>(value);
  return kSuccess;
}
KVC_API int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  if (current.empty()) return kInvalidContext;
  if (target != 0 || (scope != 100 && scope != 200)) return kInvalidValue;
  ++flushes;
  return kSuccess;
}
KVC_API int cuMemGetHandleForAddressRange(int* descriptor, DevicePointer pointer, size_t bytes, int type,
                                          unsigned long long) {
  const std::lock_guard lock(mutex);
  const auto found = find(pointer);
  if (found == allocations.end() || bytes > found->second.bytes - (pointer - found->first) || type != 1) {
    return kInvalidValue;
  }
  *descriptor = fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0);
  return *descriptor >= 0 ? kSuccess : 2;
}
// Not a driver function: keeps copies from beginning. 1: all copies. 2: copies by kernels, as on a GPU that other
// kernels fill. 0: none.
KVC_API int fakeHoldCopies(int hold) {
  copies_held = hold;
  copies_held.notify_all();
  return kSuccess;
}
// Not a driver function: returns the number of waiting copies.
KVC_API int fakeHeldCopies() { return copies_held != kHoldsNone ? copies_waiting.load() : 0; }
// Not a driver function: no work runs any more, as after a kernel's fault, and every stream reports it.
KVC_API int fakeBreak(int now) {
  broken = now != 0;
  if (broken) ++breaks;
  return kSuccess;
}
// Not a driver function: sets what the GPUs report about remote writes (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_...).
KVC_API int fakeRemoteWrites(int ordering, int options) {
  writes_ordering = ordering;
  flush_options = options;
  return kSuccess;
}
// Not a driver function: returns the number of flushes of remote writes.
KVC_API int fakeFlushes() { return flushes; }
// Not a driver function: makes an allocation unshareable, like those of a memory pool.
KVC_API int fakeForbidSharing(DevicePointer pointer) {
  const std::lock_guard lock(mutex);
  allocations[pointer].capable = false;
  return kSuccess;
}
// Not a driver function: lets two domains of one process treat each other as strangers.
KVC_API int fakeOpenOwnHandles(int open) {
  own_handles = open != 0;
  return kSuccess;
}
// Not a driver function: returns how many others map this allocation by its IPC handle.
KVC_API int fakeIpcMappings(DevicePointer pointer) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(pointer);
  return found == allocations.end() ? -1 : count_mappings(found->second.fd);
}
KVC_API int cuIpcGetMemHandle(Handle* handle, DevicePointer pointer) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(pointer);
  if (found == allocations.end() || !found->second.capable) return kInvalidValue;
  struct stat status{};
  fstat(found->second.fd, &status);
  *handle = {getpid(), found->second.fd, found->second.bytes, status.st_ino, {}};
  return kSuccess;
}
KVC_API int cuIpcOpenMemHandle_v2(DevicePointer* pointer, Handle handle, unsigned) {
  if (current.empty() || (handle.pid == getpid() && !own_handles)) return kInvalidContext;
  if (ruins_capture()) return kCaptureUnsupported;
  const std::lock_guard lock(mutex);
  for (auto& [address, allocation] : allocations) {
    if (allocation.opened == 0 || std::memcmp(&allocation.handle, &handle, sizeof(handle)) != 0) continue;
    ++allocation.opened;
    *pointer = address;
    return kSuccess;
  }
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.pid, handle.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  struct stat status{};
  if (fd < 0 || fstat(fd, &status) != 0 || status.st_ino != handle.inode || !take_mapping_lock(fd)) {
    close(fd);
    return kInvalidValue;
  }
  void* data = mmap(nullptr, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return kInvalidValue;
  *pointer = reinterpret_cast<DevicePointer>(data);
  allocations[*pointer] = {
      .bytes = handle.bytes, .fd = fd, .device = device_of_current(), .opened = 1, .handle = handle};
  return kSuccess;
}
KVC_API int cuIpcCloseMemHandle(DevicePointer pointer) {
  if (ruins_capture()) return kCaptureUnsupported;
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(pointer);
  if (found == allocations.end() || found->second.opened == 0) return kInvalidValue;
  if (--found->second.opened == 0) end_allocation(found);
  return kSuccess;
}
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
  if (offset != 0 || bytes != physical->bytes) return kNotSupported;  // as driver 580 does
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
// Not a driver function: makes imports fail from now on (or succeed again), as on a GPU without peer access.
KVC_API int fakeFailImports(int fail) {
  const std::lock_guard lock(mutex);
  imports_fail = fail != 0;
  return kSuccess;
}
// Not a driver function: returns the number of pieces mapped in this process.
KVC_API int fakeMappedPieces() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(pieces.size());
}
KVC_API int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  const std::lock_guard lock(streams_mutex);
  *stream = *streams.insert(new FakeStream).first;
  return kSuccess;
}
KVC_API int cuStreamDestroy_v2(void* stream) {
  stream_of(stream).wait();
  const std::lock_guard lock(streams_mutex);
  streams.erase(static_cast<FakeStream*>(stream));
  delete static_cast<FakeStream*>(stream);
  return kSuccess;
}
KVC_API int cuStreamQuery(void* stream) {
  if (ruins_capture()) return kCaptureUnsupported;
  if (broken) return kLaunchFailed;
  return stream_of(stream).idle() ? kSuccess : kNotReady;
}
KVC_API int cuStreamSynchronize(void* stream) {
  if (ruins_capture()) return kCaptureUnsupported;
  if (broken) return kLaunchFailed;
  ++waiting_for_streams;
  stream_of(stream).wait();
  --waiting_for_streams;
  return kSuccess;
}
// Not a driver function: returns the number of threads in cuStreamSynchronize.
KVC_API int fakeWaitingForStreams() { return waiting_for_streams; }
KVC_API int cuStreamWriteValue64_v2(void* stream, DevicePointer word, uint64_t value, unsigned) {
  if (broken) return kLaunchFailed;
  return enqueue(stream, [=, before = breaks.load()] {
    if (breaks == before) reinterpret_cast<std::atomic<uint64_t>*>(word)->store(value);
  });
}
// The real driver allows this call during a capture, although its documentation does not mention it.
KVC_API int cuModuleLoadData(void** module, const void*) {
  if (ruins_capture()) return kCaptureUnsupported;
  *module = &contexts;
  return kSuccess;
}
KVC_API int cuModuleUnload(void*) { return ruins_capture() ? kCaptureUnsupported : kSuccess; }
KVC_API int cuModuleGetFunction(const void** function, void*, const char* name) {
  for (const auto& kernel : kKernels) {
    if (std::strcmp(kernel, name) != 0) continue;
    *function = &kernel;
    return kSuccess;
  }
  return 500;
}
KVC_API int cuFuncSetAttribute(void*, int, int) { return kSuccess; }
KVC_API int cuLaunchKernel(const void* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned,
                           unsigned, void* stream, void** arguments, void**) {
  if (broken) return kLaunchFailed;
  const auto kernel = static_cast<const char* const*>(function) - kKernels;
  if (kernel == kPageSums) {
    if (grid == 0 || block != kvc::cuda::kSumThreads) return kInvalidValue;
    const auto launch = *static_cast<const kvc::PageSums*>(arguments[0]);
    return enqueue(stream, [launch] { sum_by_kernel(launch); });
  }
  if (kernel <= 1) {
    const CopyLaunch launch = *static_cast<const CopyLaunch*>(arguments[0]);
    return enqueue(stream, [launch, before = breaks.load()] { copy_pages(launch, before); });
  }
  auto* word = *static_cast<std::atomic<uint64_t>**>(arguments[0]);
  const uint64_t value = kernel == 2 ? *static_cast<const uint64_t*>(arguments[1]) : 0;
  return enqueue(stream, [=] { word->store(kernel == 2 ? value : word->load() + 1); });
}
// Only the expert kernels are launched with this call. Their attribute, which allows an early begin, changes nothing
// here.
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
};
// Whether the kernel could work with the launch. The kernel relies on these numbers, and this file's C++ does not.
static bool fits(const LaunchConfig& config, const kvc::moe::DispatchLaunch& launch) {
  const unsigned threads = config.block[0];
  bool good = config.grid[0] > 0 && threads % 32 == 0 && threads >= launch.ranks && threads <= kvc::moe::kMaxThreads;
  for (uint32_t i = 0; i < launch.column_count; ++i) {
    const kvc::moe::Column& column = launch.columns[i];
    const uint64_t places = reinterpret_cast<uintptr_t>(column.source) | column.target | column.row_bytes;
    good = good && (column.unit == 1 || column.unit == 4 || column.unit == 16) && places % column.unit == 0;
  }
  return good;
}
// The same for combine with `vectors` vectors per thread, for up to `ranks` ranks.
static bool fits(const LaunchConfig& config, const kvc::moe::CombineLaunch& launch, uint32_t vectors, uint32_t ranks) {
  const uint32_t threads = config.block[0];
  return config.grid[0] > 0 && threads % 32 == 0 && threads > 32 && threads <= kvc::moe::kMaxThreads &&
         launch.ranks <= ranks && launch.parts > 0 && uint64_t{launch.parts} * vectors * threads >= launch.vectors;
}
KVC_API int cuLaunchKernelEx(const LaunchConfig* config, const void* function, void** arguments, void**) {
  if (broken) return kLaunchFailed;
  const auto kernel = static_cast<const char* const*>(function) - kKernels;
  if (kernel < 4 || kernel == kPageSums) return kInvalidValue;
  if (kernel == 4) {
    const auto launch = *static_cast<const kvc::moe::DispatchLaunch*>(arguments[0]);
    if (!fits(*config, launch)) return kInvalidValue;
    return enqueue(config->stream, [launch] { kvc::moe::cpu_exchange::dispatch(launch); });
  }
  const auto launch = *static_cast<const kvc::moe::CombineLaunch*>(arguments[0]);
  const auto variant = static_cast<uint32_t>(kernel - 5);
  if (!fits(*config, launch, 1 + variant / 3, 2U << variant % 3)) return kInvalidValue;
  return enqueue(config->stream, [launch] { kvc::moe::cpu_exchange::combine(launch); });
}
