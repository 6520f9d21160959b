// What the tests of GPU memory share: the machine's CUDA driver or its stand-in (fake_cuda), two GPUs, and buffers there.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "cuda/driver.h"
#include "tests/rig.h"

namespace kvc::test {

// What both drivers have: the real one if there is a GPU, else the stand-in under its name.
inline const cuda::Driver* find_driver() {
  if (const Result<const cuda::Driver*> real = cuda::driver()) return real.value();
  if (dlopen(KVC_FAKE_CUDA, RTLD_NOW | RTLD_GLOBAL) == nullptr) return nullptr;
  const Result<const cuda::Driver*> loaded = cuda::driver();
  return loaded ? loaded.value() : nullptr;
}

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    driver_ = find_driver();
    ASSERT_NE(driver_, nullptr) << "neither a CUDA driver nor " << KVC_FAKE_CUDA;
    if (cuda::kernel_image().empty()) GTEST_SKIP() << "this build has no GPU kernels (no nvcc)";
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
    context->driver().cuMemFree_v2(address);
  }
  void put(const std::vector<std::byte>& data) const {
    const cuda::Context::Scope scope(*context);
    EXPECT_EQ(context->driver().cuMemcpyHtoD_v2(address, data.data(), bytes), cuda::kSuccess);
    context->driver().cuCtxSynchronize();
  }
  std::vector<std::byte> get() const {
    std::vector<std::byte> data(bytes);
    const cuda::Context::Scope scope(*context);
    EXPECT_EQ(context->driver().cuMemcpyDtoH_v2(data.data(), address, bytes), cuda::kSuccess);
    return data;
  }
  std::byte* data() const { return reinterpret_cast<std::byte*>(address); }

  std::shared_ptr<cuda::Context> context;
  size_t bytes;
  cuda::DevicePointer address = 0;
};

inline std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::vector<std::byte> data(count);
  fill_random(data.data(), count, seed);
  return data;
}

}  // namespace kvc::test
