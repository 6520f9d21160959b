// Helpers for tests of GPU memory: the machine's CUDA driver or its stand-in (fake_cuda), two GPUs, and buffers on
// them.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "providers/nvlink/connector.h"
#include "providers/nvlink/domain.h"
#include "tests/rig.h"

namespace kvc::test {

// After a fork: becomes a process that runs only this test.
[[noreturn]] inline void become_test(const char* test) {
  const std::string filter = std::string("--gtest_filter=") + test;
  for (const char* shard : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) unsetenv(shard);  // another shard has it
  execl("/proc/self/exe", "kvc_tests", filter.c_str(), "--gtest_also_run_disabled_tests", nullptr);
  _exit(127);
}

// The real driver if there is a GPU, otherwise the stand-in under the driver's name.
inline const cuda::Driver* find_driver() {
  if (const Result<const cuda::Driver*> real = cuda::driver()) return real.value();
  if (dlopen(KVC_FAKE_CUDA, RTLD_NOW | RTLD_GLOBAL) == nullptr) return nullptr;
  const Result<const cuda::Driver*> loaded = cuda::driver();
  return loaded ? loaded.value() : nullptr;
}

// A function of the loaded driver that the transfer engine does not use. Null: the driver has no function of this name.
// Names of functions that only the stand-in has begin with "fake".
template <typename Function>
Function* driver_function(const char* name) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
}

// Keeps the stand-in's copies from beginning during its life. Has no effect on a real driver.
class HeldCopies {
 public:
  enum Which : int { kAll = 1, kByKernels };
  explicit HeldCopies(Which which = kAll) { hold(which); }
  HeldCopies(const HeldCopies&) = delete;
  HeldCopies& operator=(const HeldCopies&) = delete;
  ~HeldCopies() { hold(0); }
  static bool possible() { return driver_function<int(int)>("fakeHoldCopies") != nullptr; }
  static int count() { return driver_function<int()>("fakeHeldCopies")(); }

 private:
  static void hold(int which) {
    if (auto* const function = driver_function<int(int)>("fakeHoldCopies")) function(which);
  }
};

// A thread that captures a CUDA graph during its life, in global mode like PyTorch.
class Capturing {
 public:
  explicit Capturing(const std::shared_ptr<cuda::Context>& gpu) {
    thread_ = std::thread([this, gpu] {
      const cuda::Driver& driver = gpu->driver();
      driver.cuCtxPushCurrent_v2(gpu->handle());
      cuda::Stream stream = nullptr;
      driver.cuStreamCreateWithPriority(&stream, 1, 0);
      begun_ = driver_function<int(cuda::Stream, int)>("cuStreamBeginCapture_v2")(stream, 0);
      step_ = kCaptures;
      step_.notify_all();
      step_.wait(kCaptures);
      void* graph = nullptr;
      ended_ = driver_function<int(cuda::Stream, void**)>("cuStreamEndCapture")(stream, &graph);
      if (graph != nullptr) driver_function<int(void*)>("cuGraphDestroy")(graph);
      driver.cuStreamDestroy_v2(stream);
    });
    step_.wait(kBegins);
    EXPECT_EQ(begun_, cuda::kSuccess);
  }
  Capturing(const Capturing&) = delete;
  Capturing& operator=(const Capturing&) = delete;
  ~Capturing() { end(); }
  // Result of cuStreamEndCapture. CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901): a call has ruined the capture.
  int end() {
    if (!thread_.joinable()) return ended_;
    step_ = kEnds;
    step_.notify_all();
    thread_.join();
    return ended_;
  }

 private:
  enum Step : int { kBegins, kCaptures, kEnds };
  std::atomic<int> step_{kBegins};
  int begun_ = -1;
  int ended_ = -1;
  std::thread thread_;
};

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    driver_ = find_driver();
    ASSERT_NE(driver_, nullptr) << "neither a CUDA driver nor " << KVC_FAKE_CUDA;
    if (cuda::kernel_image().empty()) GTEST_SKIP() << "needs GPU kernels: this build had no nvcc";
    int devices = 0;
    driver_->cuDeviceGetCount(&devices);
    first_ = must(cuda::Context::retain(0));
    second_ = must(cuda::Context::retain(devices - 1));
  }

  const cuda::Driver* driver_ = nullptr;
  std::shared_ptr<cuda::Context> first_;
  std::shared_ptr<cuda::Context> second_;
};

struct GpuBuffer {
  GpuBuffer(const std::shared_ptr<cuda::Context>& gpu, size_t size) : context(gpu), bytes(size) {
    const cuda::Context::Scope scope(*context);
    EXPECT_EQ(context->driver().cuMemAlloc_v2(&address, bytes), cuda::kSuccess);
    put(std::vector<std::byte>(bytes));
  }
  GpuBuffer(const GpuBuffer&) = delete;
  GpuBuffer& operator=(const GpuBuffer&) = delete;
  ~GpuBuffer() {
    const cuda::Context::Scope scope(*context);
    EXPECT_EQ(context->driver().cuMemFree_v2(address), cuda::kSuccess);
  }
  void put(const std::vector<std::byte>& data) const {
    const cuda::Context::Scope scope(*context);
    EXPECT_EQ(context->driver().cuMemcpyHtoD_v2(address, data.data(), bytes), cuda::kSuccess);
    context->driver().cuStreamSynchronize(nullptr);
  }
  std::vector<std::byte> get() const {
    std::vector<std::byte> data(bytes);
    const cuda::Context::Scope scope(*context);
    EXPECT_EQ(context->driver().cuMemcpyDtoH_v2(data.data(), address, bytes), cuda::kSuccess);
    return data;
  }
  std::byte* data() const { return reinterpret_cast<std::byte*>(address); }
  // Whether a 'synchronous' copy into the memory has ended when it returns (CU_POINTER_ATTRIBUTE_SYNC_MEMOPS).
  bool is_synchronous() const {
    unsigned on = 0;
    EXPECT_EQ(context->driver().cuPointerGetAttribute(&on, 6, address), cuda::kSuccess);
    return on != 0;
  }

  std::shared_ptr<cuda::Context> context;
  size_t bytes;
  cuda::DevicePointer address = 0;
};

// Opens a domain of the nvlink lane that claims to be of this process.
inline Result<OpenedDomain> open_nvlink(uint64_t process, ControlQueue& control) {
  auto connector = std::make_unique<nvlink::NvlinkConnector>(DomainConfig{}, process);
  if (Status opened = connector->open(); !opened) return opened.error();
  auto domain = std::make_unique<nvlink::NvlinkDomain>(connector->board(), connector->driver(), control);
  if (Status opened = domain->open(); !opened) return opened.error();
  return OpenedDomain{std::move(connector), std::move(domain)};
}

inline std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::vector<std::byte> data(count);
  fill_random(data.data(), count, seed);
  return data;
}

}  // namespace kvc::test
