// Remainder: the part of a batch that is not posted yet, in pieces of one work request each.
//
// Pages that follow each other on both sides are one piece. A page longer than a request may carry is several.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "lane/domain.h"
#include "lane/immediate.h"
#include "lane/page_runs.h"
#include "providers/verbs/memory.h"

namespace kvc::verbs {

// The bytes of one work request.
struct PageRemainder {
  uint64_t source = 0;
  uint64_t target = 0;
  uint32_t bytes = 0;
};

class Remainder {
 public:
  // How far the batch is posted.
  struct Mark {
    uint32_t run = 0;
    uint64_t offset = 0;
    uint64_t pieces = 0;  // pieces left
  };

  // Starts with all of a batch, in pieces of at most `max_piece` bytes.
  void start(const WriteBatch& batch, uint64_t max_piece) {
    work_ = batch.work;
    source_ = static_cast<const MemoryRegistration*>(batch.source);
    rkey_ = static_cast<uint32_t>(batch.rkey);
    target_base_ = batch.target_base;
    page_bytes_ = batch.page_bytes;
    counted_ = batch.counted;
    immediate_ = batch.immediate;
    max_piece_ = max_piece;
    runs_used_ = 0;
    mark_ = {};
    for_each_run(batch, max_piece, [this](const PageRun& run) {
      runs_[runs_used_++] = run;
      const uint64_t bytes = run.pages * page_bytes_;
      mark_.pieces += std::max<uint64_t>(1, (bytes + max_piece_ - 1) / max_piece_);
    });
  }

  WorkId work() const noexcept { return work_; }
  const MemoryRegistration* source() const noexcept { return source_; }  // null for a batch without bytes
  uint32_t rkey() const noexcept { return rkey_; }
  bool empty() const noexcept { return page_bytes_ == 0; }  // an immediate alone
  bool counted() const noexcept { return counted_; }
  uint32_t immediate() const noexcept { return immediate_; }
  uint64_t pieces() const noexcept { return mark_.pieces; }

  PageRemainder next() noexcept {
    const PageRun& run = runs_[mark_.run];
    const uint64_t bytes = run.pages * page_bytes_;
    const PageRemainder piece{reinterpret_cast<uint64_t>(run.source) + mark_.offset,
                              target_base_ + run.target_offset + mark_.offset,
                              static_cast<uint32_t>(std::min(bytes - mark_.offset, max_piece_))};
    mark_.offset += piece.bytes;
    if (mark_.offset == bytes) {
      ++mark_.run;
      mark_.offset = 0;
    }
    --mark_.pieces;
    return piece;
  }

  // mark() and rewind() go back to an earlier position, if the queue did not take the result of next().
  Mark mark() const noexcept { return mark_; }
  void rewind(const Mark& mark) noexcept { mark_ = mark; }

 private:
  WorkId work_ = 0;
  const MemoryRegistration* source_ = nullptr;
  uint32_t rkey_ = 0;
  uint64_t target_base_ = 0;
  uint64_t page_bytes_ = 0;
  bool counted_ = false;
  uint32_t immediate_ = 0;
  uint64_t max_piece_ = 0;
  std::array<PageRun, Immediate::kMaxMultiplicity> runs_{};
  uint32_t runs_used_ = 0;
  Mark mark_{};
};

}  // namespace kvc::verbs
