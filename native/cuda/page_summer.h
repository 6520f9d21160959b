// PageSummer: sums of pages in GPU memory (base/page_sum.h), by one kernel on a separate stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/error.h"
#include "base/page_sum.h"
#include "cuda/driver.h"

namespace kvc::cuda {

// Blocks of a launch on each of the GPU's SMs: as many of kSumThreads threads as fit there.
inline constexpr uint32_t kSumBlocksPerProcessor = 8;

class PageSummer {
 public:
  // Creates a summer for the current context. Cheap: the first sum() loads the kernel. kRefused: no driver, or no current
  // context.
  static Result<std::unique_ptr<PageSummer>> create();
  PageSummer(const PageSummer&) = delete;
  PageSummer& operator=(const PageSummer&) = delete;
  ~PageSummer();

  // Computes the sums of pages in this GPU's memory. `pages` itself is in host memory, and so are the arrays that it
  // names. BLOCKS until the GPU has read the pages: earlier writes to them must be visible. Any thread, one at a time.
  // kRefused: this build has no kernels.
  Status sum(const PageSums& pages);

 private:
  PageSummer(const Driver& driver, ContextHandle context) : driver_(driver), context_(context) {}
  // Loads the kernel and makes the stream.
  Status open();
  // Makes the pinned memory at least that large.
  Status reserve(size_t bytes);

  const Driver& driver_;
  const ContextHandle context_;
  Module module_;
  Function kernel_ = nullptr;  // null before the first sum()
  OwnedStream stream_;
  PinnedMemory pinned_;  // the arrays of a launch
  size_t pinned_bytes_ = 0;
  uint32_t blocks_ = 0;  // most blocks of a launch
};

}  // namespace kvc::cuda
