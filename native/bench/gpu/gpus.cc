#include "bench/gpu/gpus.h"

#include "bench/gpu/support.h"

namespace kvc::gpu_bench {

Gpus::Gpus()
    : sender(must(cuda::Context::retain(0))),
      receiver(must(cuda::Context::retain(1))),
      driver(sender->driver()),
      scope(*sender) {
  if (bench_kernels_image().empty()) die("this build holds no GPU kernels: nvcc was not found when it was built");
  if (sender->attribute(cuda::kAttributeMajor) < 9) die("a Hopper GPU is needed, and GPU 0 is a " + sender->name());
  const int enabled = driver.cuCtxEnablePeerAccess(receiver->handle(), 0);
  if (enabled != cuda::kPeerAccessAlreadyEnabled) must_cuda(enabled, "cuCtxEnablePeerAccess");
  must_cuda(driver.cuModuleLoadData(&module, bench_kernels_image().data()), "cuModuleLoadData");
}
Gpus::~Gpus() { driver.cuModuleUnload(module); }

cuda::Function Gpus::function(const char* name, uint32_t shared_bytes) const {
  constexpr int kMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  cuda::Function found = nullptr;
  must_cuda(driver.cuModuleGetFunction(&found, module, name), name);
  if (shared_bytes > 0) {
    must_cuda(driver.cuFuncSetAttribute(found, kMaxDynamicShared, static_cast<int>(shared_bytes)), name);
  }
  return found;
}

}  // namespace kvc::gpu_bench
