#include "cuda/page_summer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda/kernels.h"

namespace kvc::cuda {

namespace {

constexpr const char* kSumPages = "sum_pages";
// The arrays of 60,000 pages.
constexpr size_t kLeastPinned = 512 << 10;

// The arrays of a launch in pinned memory: sums, layers and runs, and behind them the blocks, which are shorter words.
struct Places {
  explicit Places(const PageSums& pages)
      : layers(uint64_t{pages.layer_count} * pages.block_count * sizeof(uint64_t)),
        runs(layers + pages.layer_count * sizeof(uint64_t)),
        blocks(runs + pages.run_count * sizeof(uint64_t)),
        end(blocks + pages.block_count * sizeof(uint32_t)) {}
  size_t layers;
  size_t runs;
  size_t blocks;
  size_t end;
};

}  // namespace

Result<std::unique_ptr<PageSummer>> PageSummer::create() {
  const Result<const Driver*> loaded = cuda::driver();
  if (!loaded) return loaded.error();
  const Driver& driver = *loaded.value();
  const RelaxedCapture relaxed(driver);
  const Result<ContextHandle> context = current_context(driver, kSumPages);
  if (!context) return context.error();
  return std::unique_ptr<PageSummer>(new PageSummer(driver, context.value()));
}

Status PageSummer::open() {
  if (kernel_ != nullptr) return {};
  Result<Module> module = Module::load(driver_);
  if (!module) return module.error();
  // Decode waits for the sums, and a launch takes under a millisecond.
  Result<OwnedStream> stream = OwnedStream::create(driver_, OwnedStream::Priority::kHighest);
  if (!stream) return stream.error();
  Result<Function> kernel = module.value().function("kvc_page_sums");
  if (!kernel) return kernel.error();
  int device = 0;
  int processors = 0;
  driver_.cuCtxGetDevice(&device);
  driver_.cuDeviceGetAttribute(&processors, kAttributeMultiprocessors, device);
  blocks_ = static_cast<uint32_t>(std::max(processors, 1)) * kSumBlocksPerProcessor;
  module_ = std::move(module.value());
  stream_ = std::move(stream.value());
  kernel_ = kernel.value();
  return {};
}

PageSummer::~PageSummer() {
  const Context::Scope scope(driver_, context_);
  stream_ = {};
  pinned_ = {};
  module_ = {};
}

Status PageSummer::reserve(size_t bytes) {
  if (bytes <= pinned_bytes_) return {};
  bytes = std::max({bytes, 2 * pinned_bytes_, kLeastPinned});  // an allocation may take a millisecond
  Result<PinnedMemory> memory = PinnedMemory::allocate(driver_, bytes);
  if (!memory) return memory.error();
  pinned_ = std::move(memory.value());
  pinned_bytes_ = bytes;
  return {};
}

Status PageSummer::sum(const PageSums& pages) {
  const uint64_t count = uint64_t{pages.layer_count} * pages.block_count;
  if (count == 0) return {};
  const Context::Scope scope(driver_, context_);
  if (Status opened = open(); !opened) return opened;
  const Places places(pages);
  if (Status reserved = reserve(places.end); !reserved) return reserved;
  auto* data = static_cast<std::byte*>(pinned_.data());
  std::memcpy(data + places.layers, pages.layers, pages.layer_count * sizeof(uint64_t));
  std::memcpy(data + places.runs, pages.runs, pages.run_count * sizeof(uint64_t));
  std::memcpy(data + places.blocks, pages.blocks, pages.block_count * sizeof(uint32_t));
  PageSums launch = pages;
  launch.sums = reinterpret_cast<uint64_t*>(pinned_.device());
  launch.layers = reinterpret_cast<const uint64_t*>(pinned_.device() + places.layers);
  launch.runs = reinterpret_cast<const uint64_t*>(pinned_.device() + places.runs);
  launch.blocks = reinterpret_cast<const uint32_t*>(pinned_.device() + places.blocks);
  void* arguments[] = {&launch};
  const auto blocks = static_cast<uint32_t>(std::min<uint64_t>(count, blocks_));
  if (const int result = driver_.cuLaunchKernel(kernel_, blocks, 1, 1, kSumThreads, 1, 1, 0, stream_.get(),
                                                static_cast<void**>(arguments), nullptr);
      result != kSuccess) {
    return cuda_error(kSumPages, "cuLaunchKernel", result);
  }
  if (const int result = driver_.cuStreamSynchronize(stream_.get()); result != kSuccess) {
    return cuda_error(kSumPages, "cuStreamSynchronize", result);
  }
  std::memcpy(pages.sums, data, count * sizeof(uint64_t));
  return {};
}

}  // namespace kvc::cuda
