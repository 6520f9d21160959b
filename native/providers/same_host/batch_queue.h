// BatchQueue: the waiting batches of one link, first in, first out, in memory that is allocated once.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lane/domain.h"
#include "lane/immediate.h"

namespace kvc::same_host {

// Used by one thread; nothing here blocks. Owns the items, not the memory to which they point.
class BatchQueue {
 public:
  struct Item {
    WorkId work = 0;
    uint64_t rkey = 0;
    uint64_t page_bytes = 0;
    uint64_t total = 0;  // bytes of all pages
    // how many of `total` are written, in order of the pages; for a lane that writes a batch piece by piece
    uint64_t written = 0;
    uint32_t count = 0;
    uint32_t immediate = 0;
    bool counted = false;
    std::array<PageWrite, Immediate::kMaxMultiplicity> pages;
    std::span<const PageWrite> all() const noexcept { return std::span(pages).first(count); }
  };

  // `depth` is the capacity, a power of two.
  explicit BatchQueue(size_t depth) : items_(depth), mask_(depth - 1) {}
  bool empty() const noexcept { return size_ == 0; }
  bool full() const noexcept { return size_ > mask_; }
  // Must not be called when empty(). The reference is valid until the item is popped.
  Item& front() noexcept { return items_[head_]; }
  const Item& front() const noexcept { return items_[head_]; }
  void pop() noexcept {
    head_ = (head_ + 1) & mask_;
    --size_;
  }
  // Must not be called when full().
  void push(const WriteBatch& batch) noexcept {
    Item& item = items_[(head_ + size_) & mask_];
    ++size_;
    item.work = batch.work;
    item.rkey = batch.rkey;
    item.page_bytes = batch.page_bytes;
    item.count = static_cast<uint32_t>(batch.pages.size());
    item.total = item.count * batch.page_bytes;
    item.written = 0;
    item.immediate = batch.immediate;
    item.counted = batch.counted;
    std::copy(batch.pages.begin(), batch.pages.end(), item.pages.begin());
  }

 private:
  std::vector<Item> items_;
  size_t mask_;
  size_t head_ = 0;
  size_t size_ = 0;
};

}  // namespace kvc::same_host
