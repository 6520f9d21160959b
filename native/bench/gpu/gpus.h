// Gpus: GPU 0 with access to GPU 1, and the kernels of bench_kernels.cu.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "cuda/driver.h"

namespace kvc::gpu_bench {

// GPU 0's context becomes current on the thread that creates this.
struct Gpus {
  Gpus();
  Gpus(const Gpus&) = delete;
  Gpus& operator=(const Gpus&) = delete;
  ~Gpus();
  cuda::Function function(const char* name, uint32_t shared_bytes) const;

  std::shared_ptr<cuda::Context> sender;
  std::shared_ptr<cuda::Context> receiver;
  const cuda::Driver& driver;
  cuda::Context::Scope scope;
  cuda::ModuleHandle module = nullptr;
};

// The compiled bench_kernels.cu; empty in a build without nvcc.
std::span<const unsigned char> bench_kernels_image() noexcept;

}  // namespace kvc::gpu_bench
