#include "bench/gpu/load.h"

#include <chrono>

namespace kvc::gpu_bench {

Load::Load(const Gpus& gpus, Kind kind, const Buffer& memory)
    : gpus_(gpus),
      kind_(kind),
      memory_(memory),
      word_(must(cuda::PinnedMemory::allocate(gpus.driver, sizeof(uint64_t)))) {
  if (kind != Kind::kNone) thread_ = std::thread([this] { run(); });
}

Load::~Load() {
  stop_.store(true);
  if (thread_.joinable()) thread_.join();
}

void Load::run() {
  const cuda::Driver& driver = gpus_.driver;
  const cuda::Context::Scope scope(*gpus_.sender);
  const auto stream = must(cuda::OwnedStream::create(driver, cuda::OwnedStream::Priority::kLowest));
  const auto processors = static_cast<unsigned>(gpus_.sender->attribute(cuda::kAttributeMultiprocessors));
  const cuda::Function product = gpus_.function("bench_product", kProductShared);
  const cuda::Function reading = gpus_.function("bench_stream", 0);
  cuda::DevicePointer memory = memory_.address;
  uint64_t vectors = memory_.bytes / 16;
  // A round is 384 cycles of an SM: 0.2 us.
  uint32_t rounds = kind_ == Kind::kPersistent ? 1500 : 100;
  const unsigned blocks = kind_ == Kind::kPersistent ? processors
                          : kind_ == Kind::kTiled    ? 5 * processors
                                                     : 4 * processors;
  for (uint64_t launched = 0; !stop_.load();) {
    // Three kernels are queued behind the running one, so that the GPU never waits.
    if (launched - ended() >= 4) {
      std::this_thread::sleep_for(std::chrono::microseconds(10));
      continue;
    }
    void* product_arguments[] = {&memory, &rounds};
    void* reading_arguments[] = {&memory, &vectors, &memory};
    const bool reads = kind_ == Kind::kStream;
    must_cuda(driver.cuLaunchKernel(reads ? reading : product, blocks, 1, 1, reads ? kStreamThreads : kProductThreads,
                                    1, 1, reads ? 0 : kProductShared, stream.get(),
                                    static_cast<void**>(reads ? reading_arguments : product_arguments), nullptr),
              "cuLaunchKernel");
    must_cuda(driver.cuStreamWriteValue64_v2(stream.get(), word_.device(), ++launched, 0), "WriteValue");
  }
  driver.cuStreamSynchronize(stream.get());
}

}  // namespace kvc::gpu_bench
