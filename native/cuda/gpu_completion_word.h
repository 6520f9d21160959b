// GpuCompletionWord: a 64-bit word that the engine stores and a kernel polls: how a GPU learns, without a launch, that what
// it waits for has come.
//
// It lies in page-locked host memory, where the store is a plain one and each look of the GPU's goes over PCIe; or in
// the GPU's memory, where the GPU looks at full speed, and a stream of ours writes it. A kernel that polls it loads it
// with acquire, of system scope, and then reads what it stands for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "cuda/driver.h"
#include "cuda/remote_writes.h"
#include "lane/completion_word.h"

namespace kvc::cuda {

class GpuCompletionWord final : public CompletionWord {
 public:
  enum class Place : uint8_t { kHost, kGpu };

  // For kernels of the GPU `device`; 0 at first. `remote_writes`: NICs write what it stands for into that GPU's memory
  // (remote_writes.h), which each store shows to running kernels first. kRefused where the GPU cannot do what is asked.
  // Blocks.
  static Result<std::unique_ptr<GpuCompletionWord>> create(int device, Place place, bool remote_writes);
  GpuCompletionWord(const GpuCompletionWord&) = delete;
  GpuCompletionWord& operator=(const GpuCompletionWord&) = delete;
  // When no kernel polls it any more. Blocks.
  ~GpuCompletionWord() override;

  // One thread at a time; does not wait for what runs on the GPU. In host memory the word has its value when this returns;
  // in the GPU's the store is on the stream then, and a kernel sees it a while later.
  Status store(uint64_t value) noexcept override;

  // Where the host finds it; null: it is in the GPU's memory.
  const std::atomic<uint64_t>* host() const noexcept { return pinned_.data() != nullptr ? &pinned_.word() : nullptr; }
  // Where kernels do.
  DevicePointer device() const noexcept { return pinned_.data() != nullptr ? pinned_.device() : word_; }

 private:
  explicit GpuCompletionWord(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  const std::shared_ptr<Context> context_;
  std::optional<RemoteWrites> remote_writes_;
  PinnedMemory pinned_;     // kHost
  DevicePointer word_ = 0;  // kGpu
  OwnedStream stream_;      // kGpu: nothing else runs on it
};

}  // namespace kvc::cuda
