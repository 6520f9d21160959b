// Ways to copy pages from GPU 0 into GPU 1: the Copier's, and candidates for small batches.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "gpu_bench/candidates.h"

namespace kvc::gpu_bench {

// GPU 0 with access to GPU 1, and the kernels of candidates.cu. Its context is current on the thread that makes it.
struct Gpus {
  Gpus();
  Gpus(const Gpus&) = delete;
  Gpus& operator=(const Gpus&) = delete;
  ~Gpus();
  // `carve_out`: the kernel wants all of an SM's memory as shared memory, like a product's.
  cuda::Function function(const char* name, uint32_t shared_bytes, bool carve_out = false) const;

  std::shared_ptr<cuda::Context> sender;
  std::shared_ptr<cuda::Context> receiver;
  const cuda::Driver& driver;
  cuda::Context::Scope scope;
  cuda::ModuleHandle module = nullptr;
  cuda::PinnedMemory load_words;  // of Load: while a kernel stays, nothing may be allocated or freed
};

// One thread. Pages are of kPage bytes.
class Method {
 public:
  static constexpr uint64_t kPage = 64 << 10;

  Method() = default;
  Method(const Method&) = delete;
  Method& operator=(const Method&) = delete;
  virtual ~Method() = default;
  // Hands the pages over. Waits where the method takes no more before some of them are there.
  virtual void post(std::span<const PageCopy> pages) = 0;
  // All that was posted is at the receiver.
  virtual bool done() = 0;
  // After done(), outside of what is timed: what the method has to do before the next post().
  virtual void prepare() {}
};

// The compiled candidates.cu; empty in a build without nvcc.
std::span<const unsigned char> candidates_image() noexcept;

std::vector<std::string> method_names();
// Dies where the driver or this machine lacks what it needs, and says what.
std::unique_ptr<Method> make_method(const std::string& name, Gpus& gpus);

}  // namespace kvc::gpu_bench
