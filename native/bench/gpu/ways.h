// Ways to copy pages from GPU 0 into GPU 1, for comparisons.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "bench/gpu/gpus.h"
#include "bench/gpu/support.h"
#include "cuda/copier.h"

namespace kvc::gpu_bench {

// Used by one thread.
class Way {
 public:
  Way() = default;
  Way(const Way&) = delete;
  Way& operator=(const Way&) = delete;
  virtual ~Way() = default;
  // Posts the pages. If the queue is full, waits until some of them have arrived.
  virtual void post(std::span<const cuda::PageCopy> pages) = 0;
  // Whether all posted pages have arrived.
  virtual bool done() = 0;
};

// Copies pages of `page` bytes with the Copier; without `engines`, by its kernel alone.
class ByCopier final : public Way {
 public:
  ByCopier(const Gpus& gpus, bool engines, uint64_t page) : page_(page) {
    auto& table = const_cast<cuda::Driver&>(gpus.driver);  // this process's own copy of the driver's addresses
    const auto batches = table.cuMemcpyBatchAsync;
    if (!engines) table.cuMemcpyBatchAsync = nullptr;
    constexpr uint32_t kBlocks = 16;  // DomainConfig::copy_blocks
    copier_ = must(cuda::Copier::open(gpus.sender, kBlocks));
    table.cuMemcpyBatchAsync = batches;
  }
  void post(std::span<const cuda::PageCopy> pages) override {
    for (size_t at = 0; at < pages.size();) {
      while (!copier_->can_begin()) copier_->finished();
      copier_->begin(page_);
      for (; at < pages.size() && copier_->has_room(1); ++at) copier_->add(pages[at].source, pages[at].target);
      must(copier_->launch());
    }
  }
  bool done() override { return copier_->idle(); }

 private:
  const uint64_t page_;
  std::unique_ptr<cuda::Copier> copier_;
};

// Copies pages of `page` bytes with the copy engines, on its own stream.
class ByEngines final : public Way {
 public:
  ByEngines(const Gpus& gpus, uint64_t page) : driver_(gpus.driver), page_(page) {
    if (driver_.cuMemcpyBatchAsync == nullptr) die("the driver copies no batches: CUDA 12.8 or later is needed");
  }
  void post(std::span<const cuda::PageCopy> pages) override {
    targets_.clear();
    sources_.clear();
    for (const cuda::PageCopy& page : pages) {
      targets_.push_back(page.target);
      sources_.push_back(page.source);
    }
    sizes_.assign(pages.size(), page_);
    cuda::CopyAttributes attributes{1, {}, {}, 1};  // as the Copier does
    size_t first = 0;
    size_t failed = 0;
    must_cuda(driver_.cuMemcpyBatchAsync(targets_.data(), sources_.data(), sizes_.data(), pages.size(), &attributes,
                                         &first, 1, &failed, stream_.get()),
              "cuMemcpyBatchAsync");
    must_cuda(driver_.cuStreamWriteValue64_v2(stream_.get(), word_.device(), ++posted_, 0), "cuStreamWriteValue64");
  }
  bool done() override { return word_.word().load(std::memory_order_acquire) == posted_; }

 private:
  const cuda::Driver& driver_;
  const uint64_t page_;
  const cuda::OwnedStream stream_ = must(cuda::OwnedStream::create(driver_, cuda::OwnedStream::Priority::kLowest));
  const cuda::PinnedMemory word_ = must(cuda::PinnedMemory::allocate(driver_, sizeof(uint64_t)));
  std::vector<cuda::DevicePointer> targets_;
  std::vector<cuda::DevicePointer> sources_;
  std::vector<size_t> sizes_;
  uint64_t posted_ = 0;
};

inline void wait(Way& way) {
  const int64_t deadline = now_ns() + 2'000'000'000;
  while (!way.done()) {
    if (now_ns() > deadline) die("a copy takes longer than 2 s");
  }
}

}  // namespace kvc::gpu_bench
