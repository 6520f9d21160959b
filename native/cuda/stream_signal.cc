#include "cuda/stream_signal.h"

#include <utility>

namespace kvc::cuda {

Result<std::shared_ptr<StreamSignal>> StreamSignal::create(std::function<void()> wake) {
  const Result<const Driver*> loaded = cuda::driver();
  if (!loaded) return loaded.error();
  const Driver& driver = *loaded.value();
  const RelaxedCapture relaxed(driver);
  const Result<ContextHandle> context = current_context(driver, "create_stream_signal");
  if (!context) return context.error();
  Result<PinnedMemory> memory = PinnedMemory::allocate(driver, sizeof(uint64_t));
  if (!memory) return memory.error();

  int device = 0;
  int writes = 0;
  driver.cuCtxGetDevice(&device);
  driver.cuDeviceGetAttribute(&writes, kAttributeStreamWrites64, device);
  Module module;
  Function store = nullptr;
  Function advance = nullptr;
  Result<Module> kernels = Module::load(driver);
  if (kernels) {
    module = std::move(kernels.value());
    Result<Function> found = module.function("kvc_signal_advance");
    if (!found) return found.error();
    advance = found.value();
    if (writes == 0) {
      found = module.function("kvc_signal_store");
      if (!found) return found.error();
      store = found.value();
    }
  } else if (writes == 0) {
    return kernels.error();
  }
  return std::shared_ptr<StreamSignal>(new StreamSignal(std::move(wake), driver, std::move(memory.value()),
                                                        std::move(module), store, advance, context.value()));
}

StreamSignal::StreamSignal(std::function<void()> wake, const Driver& driver, PinnedMemory memory, Module module,
                           Function store, Function advance, ContextHandle context)
    : LayerSignal(std::move(wake), &memory.word()),
      driver_(driver),
      memory_(std::move(memory)),
      module_(std::move(module)),
      store_(store),
      advance_(advance),
      context_(context) {}

StreamSignal::~StreamSignal() {
  // Runs on any thread but the transfer thread (ControlOwned). That thread has another context or none, and freeing
  // waits for the streams that use the memory.
  const Context::Scope scope(driver_, context_);
  module_ = {};
  memory_ = {};
}

Status StreamSignal::store_on_stream(Stream stream, uint64_t value) noexcept {
  if (store_ != nullptr) return launch(store_, stream, value);
  // Flags 0: with a memory barrier, so that the layer's pages are visible before the value.
  const int result = driver_.cuStreamWriteValue64_v2(stream, memory_.device(), value, 0);
  if (result != kSuccess) return cuda_error("store_on_stream", "cuStreamWriteValue64", result);
  return {};
}

Status StreamSignal::advance_on_stream(Stream stream) noexcept {
  if (advance_ == nullptr) {
    return Error{ErrorCode::kRefused, "cuda", {}, "advance_on_stream", "this build holds no GPU kernels"};
  }
  return launch(advance_, stream, 0);
}

Status StreamSignal::launch(Function kernel, Stream stream, uint64_t value) noexcept {
  DevicePointer word = memory_.device();
  void* arguments[] = {&word, &value};  // kvc_signal_advance takes only the first one
  const int result =
      driver_.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, static_cast<void**>(arguments), nullptr);
  if (result != kSuccess) return cuda_error("store_on_stream", "cuLaunchKernel", result);
  return {};
}

}  // namespace kvc::cuda
