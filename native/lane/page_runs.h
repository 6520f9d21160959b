// Page runs: pages of a batch that are contiguous on both sides, as one piece.
//
// A provider may send each run as one write; the immediate still counts every page of it. A KV cache that was filled in
// order is one run throughout, so that one write replaces up to 64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lane/domain.h"

namespace kvc {

struct PageRun {
  const std::byte* source = nullptr;
  uint64_t target_offset = 0;
  uint32_t pages = 0;  // the length is pages * page_bytes
};

// Calls `use(PageRun)` for the runs of `batch`, in page order. Together the runs cover all pages. `max_bytes` is the
// most that one write of the provider may carry: a run ends before it would exceed this, but has one page at least. A
// batch of 0-byte pages (an immediate alone) is one run.
template <typename Use>
void for_each_run(const WriteBatch& batch, uint64_t max_bytes, Use&& use) {
  PageRun run;
  for (const PageWrite& page : batch.pages) {
    const uint64_t length = run.pages * batch.page_bytes;
    const bool follows = run.pages > 0 && page.source == run.source + length &&
                         page.target_offset == run.target_offset + length && length + batch.page_bytes <= max_bytes;
    if (follows || (run.pages > 0 && batch.page_bytes == 0)) {
      ++run.pages;
      continue;
    }
    if (run.pages > 0) use(run);
    run = {page.source, page.target_offset, 1};
  }
  if (run.pages > 0) use(run);
}

template <typename Use>
void for_each_run(const WriteBatch& batch, Use&& use) {
  for_each_run(batch, UINT64_MAX, static_cast<Use&&>(use));
}

}  // namespace kvc
