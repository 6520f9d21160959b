#include "cuda/gpu_completion_word.h"

namespace kvc::cuda {

namespace {

constexpr std::string_view kOperation = "create_completion_word";

}  // namespace

Result<std::unique_ptr<GpuCompletionWord>> GpuCompletionWord::create(int device, Place place, bool remote_writes) {
  Result<std::shared_ptr<Context>> context = Context::retain(device);
  if (!context) return context.error();
  const Context& gpu = *context.value();
  const Driver& driver = gpu.driver();
  std::unique_ptr<GpuCompletionWord> word(new GpuCompletionWord(context.value()));
  if (remote_writes) {
    Result<RemoteWrites> writes = RemoteWrites::of(context.value());
    if (!writes) return writes.error();
    word->remote_writes_ = std::move(writes.value());
  }
  const Context::Scope scope(gpu);
  if (place == Place::kHost) {
    Result<PinnedMemory> pinned = PinnedMemory::allocate(driver, sizeof(uint64_t));
    if (!pinned) return pinned.error();
    word->pinned_ = std::move(pinned.value());
    return word;
  }
  if (gpu.attribute(kAttributeStreamWrites64) == 0) {
    return Error{ErrorCode::kRefused,
                 "cuda",
                 {},
                 std::string(kOperation),
                 gpu.name() + " cannot write 64-bit words from a stream: create the completion word in host memory"};
  }
  Result<OwnedStream> stream = OwnedStream::create(driver, OwnedStream::Priority::kHighest);
  if (!stream) return stream.error();
  word->stream_ = std::move(stream.value());
  if (int result = driver.cuMemAlloc_v2(&word->word_, sizeof(uint64_t)); result != kSuccess) {
    return cuda_error(kOperation, "cuMemAlloc", result);
  }
  if (int result = driver.cuMemsetD8_v2(word->word_, 0, sizeof(uint64_t)); result != kSuccess) {
    return cuda_error(kOperation, "cuMemsetD8", result);
  }
  return word;
}

GpuCompletionWord::~GpuCompletionWord() {
  const Context::Scope scope(*context_);
  // Freed here, because their destructors need the scope.
  stream_ = {};
  pinned_ = {};
  if (word_ != 0) context_->driver().cuMemFree_v2(word_);
}

Status GpuCompletionWord::store(uint64_t value) noexcept {
  if (remote_writes_) {
    if (Status flushed = remote_writes_->flush(); !flushed) return flushed;
  }
  if (pinned_.data() != nullptr) {
    pinned_.word().store(value, std::memory_order_release);
    return {};
  }
  const Context::Scope scope(*context_);
  // Flags 0: with a memory barrier, so that the pages are visible before the word changes.
  const int result = context_->driver().cuStreamWriteValue64_v2(stream_.get(), word_, value, 0);
  if (result != kSuccess) return cuda_error("store", "cuStreamWriteValue64", result);
  return {};
}

}  // namespace kvc::cuda
