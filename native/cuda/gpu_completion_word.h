// GpuCompletionWord: a 64-bit word that the transfer engine stores and a kernel polls. A running kernel thus learns
// without a launch that its pages have arrived.
//
// The word lies in one of two places. In page-locked host memory, the store is a plain one, and each poll of the GPU
// crosses PCIe. In GPU memory, the GPU polls at full speed, and a stream of the transfer engine writes the word. The
// polling kernel must load the word with acquire semantics at system scope before it reads the pages.
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

  // Creates a word for kernels of the GPU `device`, with the value 0. `remote_writes`: NICs write the pages into that
  // GPU's memory (remote_writes.h), and each store first makes their writes visible to running kernels. kRefused: the
  // GPU does not support the request. Blocks.
  static Result<std::unique_ptr<GpuCompletionWord>> create(int device, Place place, bool remote_writes);
  GpuCompletionWord(const GpuCompletionWord&) = delete;
  GpuCompletionWord& operator=(const GpuCompletionWord&) = delete;
  // To be called when no kernel polls the word any more. Blocks.
  ~GpuCompletionWord() override;

  // One thread at a time. Does not wait for work that runs on the GPU. A word in host memory has its value when the
  // call returns. For a word in GPU memory the store is then on the stream, and kernels see it a little later.
  Status store(uint64_t value) noexcept override;

  // The word's address on the host; null: the word is in GPU memory.
  const std::atomic<uint64_t>* host() const noexcept { return pinned_.data() != nullptr ? &pinned_.word() : nullptr; }
  // The word's address for kernels.
  DevicePointer device() const noexcept { return pinned_.data() != nullptr ? pinned_.device() : word_; }

 private:
  explicit GpuCompletionWord(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  const std::shared_ptr<Context> context_;
  std::optional<RemoteWrites> remote_writes_;
  PinnedMemory pinned_;     // kHost
  DevicePointer word_ = 0;  // kGpu
  OwnedStream stream_;      // kGpu: no other work runs on it
};

}  // namespace kvc::cuda
