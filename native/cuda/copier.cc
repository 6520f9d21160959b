#include "cuda/copier.h"

#include <algorithm>
#include <utility>

namespace kvc::cuda {

namespace {

constexpr int kReadInStreamOrder = 1;        // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
constexpr unsigned kOverlapWithCompute = 1;  // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE

// Each stream's word of finished launches has its own cache line, because the transfer thread polls it.
constexpr size_t kWordStride = 64;
constexpr size_t kListsOffset = kStreams * kWordStride;
constexpr size_t kListBytes = kLaunchPages * sizeof(PageCopy);
constexpr size_t kPinnedBytes = kListsOffset + kLaunches * kListBytes;

}  // namespace

Result<std::unique_ptr<Copier>> Copier::open(std::shared_ptr<Context> context, uint32_t blocks) {
  const Context::Scope scope(*context);
  const Driver& driver = context->driver();
  std::unique_ptr<Copier> copier(new Copier(std::move(context), blocks));
  const Context& gpu = *copier->context_;
  const auto processors = static_cast<uint32_t>(gpu.attribute(kAttributeMultiprocessors));
  copier->blocks_ = std::max<uint32_t>(std::min(blocks, processors) / kStreams, 1);

  Result<Module> module = Module::load(driver);
  if (!module) return module.error();
  copier->module_ = std::move(module.value());
  if (gpu.attribute(kAttributeMajor) >= 9) {
    Result<Function> bulk = copier->module_.function("kvc_copy_bulk", kBulkSharedBytes);
    if (!bulk) return bulk.error();
    copier->bulk_ = bulk.value();
  }
  Result<Function> vector = copier->module_.function("kvc_copy_vector");
  if (!vector) return vector.error();
  copier->vector_ = vector.value();
  copier->engines_ = driver.cuMemcpyBatchAsync != nullptr && gpu.attribute(kAttributeStreamWrites64) != 0;

  for (OwnedStream& stream : copier->streams_) {
    Result<OwnedStream> created = OwnedStream::create(driver, OwnedStream::Priority::kLowest);
    if (!created) return created.error();
    stream = std::move(created.value());
  }
  Result<PinnedMemory> pinned = PinnedMemory::allocate(driver, kPinnedBytes);
  if (!pinned) return pinned.error();
  copier->pinned_ = std::move(pinned.value());
  constexpr size_t kCounters = kStreams * sizeof(uint32_t);
  if (int result = driver.cuMemAlloc_v2(&copier->blocks_done_, kCounters); result != kSuccess) {
    return cuda_error("open", "cuMemAlloc", result);
  }
  if (int result = driver.cuMemsetD8_v2(copier->blocks_done_, 0, kCounters); result != kSuccess) {
    return cuda_error("open", "cuMemsetD8", result);
  }
  return copier;
}

Copier::~Copier() {
  wait();
  const Context::Scope scope(*context_);
  if (blocks_done_ != 0) context_->driver().cuMemFree_v2(blocks_done_);
  // Freed here, because their destructors need the scope.
  pinned_ = {};
  for (OwnedStream& stream : streams_) stream = {};
  module_ = {};
}

void Copier::begin(uint64_t page_bytes) noexcept {
  page_bytes_ = page_bytes;
  pages_ = 0;
  address_bits_ = page_bytes;
}

PageCopy* Copier::list() const noexcept {
  auto* lists = reinterpret_cast<PageCopy*>(static_cast<std::byte*>(pinned_.data()) + kListsOffset);
  return lists + launched_ % kLaunches * kLaunchPages;
}

void Copier::add(uint64_t source, uint64_t target) noexcept {
  list()[pages_++] = {source, target};
  address_bits_ |= source | target;
}

Status Copier::launch() {
  if (pages_ == 0) return {};
  const Context::Scope scope(*context_);
  if (engines_ && pages_ <= kEnginePages) {
    engines_ = launch_engines();
    if (engines_) return {};
    // If the engines fail, copies that have begun end before the kernel begins, and the kernel repeats them. If the
    // kernel does not begin, wait for those copies: after an error, the caller may reuse the pages.
    const uint64_t place = launched_ % kStreams;
    Status launched = launch_kernel();
    if (!launched) context_->driver().cuStreamSynchronize(streams_[place].get());
    return launched;
  }
  return launch_kernel();
}

Status Copier::launch_kernel() {
  const uint64_t units_per_page = (page_bytes_ + kUnitBytes - 1) / kUnitBytes;
  const uint64_t units = units_per_page * pages_;
  if (units > UINT32_MAX) {
    return Error{ErrorCode::kInvalidArgument, "cuda", {}, "write", "a page exceeds 64 TiB"};
  }
  const uint64_t stream = launched_ % kStreams;
  CopyLaunch launch{
      .pages = reinterpret_cast<const PageCopy*>(pinned_.device() + kListsOffset + launched_ % kLaunches * kListBytes),
      .page_bytes = page_bytes_,
      .units_per_page = static_cast<uint32_t>(units_per_page),
      .units = static_cast<uint32_t>(units),
      .blocks_done = reinterpret_cast<uint32_t*>(blocks_done_) + stream,
      .finished = reinterpret_cast<uint64_t*>(pinned_.device() + stream * kWordStride),
      .sequence = launched_ + 1,
  };
  const bool bulk = bulk_ != nullptr && address_bits_ % 16 == 0;
  const auto blocks = static_cast<uint32_t>(std::min<uint64_t>(blocks_, units));
  void* arguments[] = {&launch};
  // The list is written with plain stores. The launch itself makes them visible to the GPU.
  const int result = context_->driver().cuLaunchKernel(
      bulk ? bulk_ : vector_, blocks, 1, 1, bulk ? kBulkThreads : kVectorThreads, 1, 1, bulk ? kBulkSharedBytes : 0,
      streams_[stream].get(), static_cast<void**>(arguments), nullptr);
  if (result != kSuccess) return cuda_error("write", "cuLaunchKernel", result);
  ++launched_;
  pages_ = 0;
  return {};
}

bool Copier::launch_engines() {
  std::array<DevicePointer, kEnginePages> sources{};
  std::array<DevicePointer, kEnginePages> targets{};
  std::array<size_t, kEnginePages> lengths{};
  lengths.fill(page_bytes_);
  for (uint32_t i = 0; i < pages_; ++i) {
    sources[i] = list()[i].source;
    targets[i] = list()[i].target;
  }
  CopyAttributes attributes{
      .source_order = kReadInStreamOrder, .source_hint = {}, .target_hint = {}, .flags = kOverlapWithCompute};
  size_t first = 0;  // index of the first page to which the attributes apply
  size_t failed = 0;
  const Driver& driver = context_->driver();
  const uint64_t place = launched_ % kStreams;
  const Stream stream = streams_[place].get();
  if (driver.cuMemcpyBatchAsync(targets.data(), sources.data(), lengths.data(), pages_, &attributes, &first, 1, &failed,
                                stream) != kSuccess) {
    return false;
  }
  // Flags 0: the write follows a fence that is for the stream what __threadfence_system() is for a thread. A reader of
  // the number, and a peer that it then notifies, therefore sees the bytes, as after the kernel's fence.
  const DevicePointer word = pinned_.device() + place * kWordStride;
  if (driver.cuStreamWriteValue64_v2(stream, word, launched_ + 1, 0) != kSuccess) return false;
  ++launched_;
  pages_ = 0;
  return true;
}

uint64_t Copier::finished() noexcept {
  // Launch n ran on stream (n - 1) % kStreams, on which all earlier launches have ended too.
  while (finished_seen_ < launched_) {
    const std::atomic<uint64_t>& word = pinned_.word(finished_seen_ % kStreams * kWordStride);
    if (word.load(std::memory_order_acquire) <= finished_seen_) break;
    ++finished_seen_;
  }
  return finished_seen_;
}

Status Copier::health() const {
  const Context::Scope scope(*context_);
  for (const OwnedStream& stream : streams_) {
    const int result = context_->driver().cuStreamQuery(stream.get());
    if (result == kSuccess || result == kNotReady) continue;
    return cuda_error("write", "cuStreamQuery", result);
  }
  return {};
}

void Copier::wait() const {
  const Context::Scope scope(*context_);
  for (const OwnedStream& stream : streams_) {
    if (stream.get() != nullptr) context_->driver().cuStreamSynchronize(stream.get());
  }
}

}  // namespace kvc::cuda
