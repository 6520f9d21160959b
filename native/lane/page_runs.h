// Page runs: pages of a batch that follow each other without a gap on both sides, as one piece.
//
// A provider may put each run onto the wire as one write; the immediate still stands for every page of it. A KV
// cache that was filled in order is such a run throughout: one write then does the work of up to 64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lane/domain.h"

namespace kvc {

struct PageRun {
  const std::byte* source = nullptr;
  uint64_t target_offset = 0;
  uint32_t pages = 0;  // its length is pages * page_bytes
};

// Calls `use(PageRun)` for the runs of `batch`, in order of its pages: together they are all its pages. `max_bytes`:
// what one write of the provider may carry; a run ends before it would exceed that, but has one page at least.
// A batch of 0-byte pages (an immediate alone) is one run.
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
