#include "gpu_bench/methods.h"

#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <utility>

#include "cuda/copier.h"
#include "gpu_bench/support.h"

namespace kvc::gpu_bench {

namespace {

using cuda::DevicePointer;
using cuda::Driver;
using cuda::Function;
using cuda::OwnedStream;
using cuda::PinnedMemory;
using Priority = cuda::OwnedStream::Priority;

// DomainConfig::copy_blocks, which the Copier shares out over its streams.
constexpr uint32_t kBlocks = 16 / cuda::kStreams;
constexpr size_t kLine = 64;

// A function of the driver's that the engine has no use for.
template <typename F>
F* find(std::initializer_list<const char*> symbols) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  for (const char* symbol : symbols) {
    if (void* found = dlsym(library, symbol)) return reinterpret_cast<F*>(found);
  }
  die(std::string("this driver has no ") + *symbols.begin());
}

uint32_t units_of(size_t pages, uint32_t unit) {
  return static_cast<uint32_t>((Method::kPage + unit - 1) / unit * pages);
}

// Calls `launch(pages)` for at most `most` pages at a time.
template <typename Launch>
void in_parts(std::span<const PageCopy> pages, size_t most, Launch&& launch) {
  for (size_t at = 0; at < pages.size(); at += most) launch(pages.subspan(at, std::min(most, pages.size() - at)));
}

// --- Today's

class ByCopier final : public Method {
 public:
  explicit ByCopier(Gpus& gpus) : copier_(must(cuda::Copier::open(gpus.sender, kBlocks * cuda::kStreams))) {}
  void post(std::span<const PageCopy> pages) override {
    for (size_t at = 0; at < pages.size();) {
      while (!copier_->can_begin()) copier_->finished();
      copier_->begin(kPage);
      for (; at < pages.size() && copier_->has_room(1); ++at) copier_->add(pages[at].source, pages[at].target);
      must(copier_->launch());
    }
  }
  bool done() override { return copier_->idle(); }

 private:
  std::unique_ptr<cuda::Copier> copier_;
};

// --- Kernels with their pages in their arguments

// A stream whose launches each say so by a word a block.
class InlineStream {
 public:
  InlineStream(Gpus& gpus, bool large, Priority priority, bool carve_out = false)
      : driver_(gpus.driver),
        unit_(large ? kLargeUnit : kSmallUnit),
        shared_(large ? kLargeShared : kSmallShared),
        blocks_(large ? kBlocks : kMaxBlocks),
        function_(gpus.function(large ? "bench_inline_large" : "bench_inline_small", shared_, carve_out)),
        stream_(must(OwnedStream::create(driver_, priority))),
        finished_(must(PinnedMemory::allocate(driver_, kMaxBlocks * sizeof(uint64_t)))) {}

  // The launch of these pages, for launch().
  InlineLaunch& fill(std::span<const PageCopy> pages) {
    std::copy(pages.begin(), pages.end(), launch_.pages);
    launch_.page_bytes = Method::kPage;
    launch_.count = static_cast<uint32_t>(pages.size());
    launch_.finished = reinterpret_cast<uint64_t*>(finished_.device());
    launch_.sequence = ++sequence_;
    last_blocks_ = std::min(blocks_, units_of(pages.size(), unit_));
    return launch_;
  }
  void launch(std::span<const PageCopy> pages) {
    void* arguments[] = {&fill(pages)};
    must_cuda(driver_.cuLaunchKernel(function_, last_blocks_, 1, 1, 32, 1, 1, shared_, stream_.get(),
                                     static_cast<void**>(arguments), nullptr),
              "cuLaunchKernel");
  }
  // A stream's launches end in their order.
  bool done() const {
    for (uint32_t block = 0; block < last_blocks_; ++block) {
      if (finished_.word(block * sizeof(uint64_t)).load(std::memory_order_acquire) < sequence_) return false;
    }
    return true;
  }
  uint32_t blocks() const { return last_blocks_; }
  uint32_t shared() const { return shared_; }
  Function function() const { return function_; }
  cuda::Stream stream() const { return stream_.get(); }

 private:
  const Driver& driver_;
  const uint32_t unit_;
  const uint32_t shared_;
  const uint32_t blocks_;
  const Function function_;
  const OwnedStream stream_;
  const PinnedMemory finished_;
  InlineLaunch launch_{};
  uint64_t sequence_ = 0;
  uint32_t last_blocks_ = 0;
};

// Two streams in turn, as the Copier's: one fills the link while the other begins or ends.
class Inline final : public Method {
 public:
  Inline(Gpus& gpus, bool large, Priority priority, bool carve_out = false)
      : streams_{InlineStream(gpus, large, priority, carve_out), InlineStream(gpus, large, priority, carve_out)} {}
  void post(std::span<const PageCopy> pages) override {
    in_parts(pages, kInlinePages, [this](std::span<const PageCopy> part) { streams_[turn_++ % 2].launch(part); });
  }
  bool done() override { return streams_[0].done() && streams_[1].done(); }

 private:
  std::array<InlineStream, 2> streams_;
  uint32_t turn_ = 0;
};

// CUDA_KERNEL_NODE_PARAMS_v2
struct KernelNode {
  Function function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void** arguments;
  void** extra;
  void* kernel;
  void* context;
};
static_assert(sizeof(KernelNode) == 72);

class ByGraph final : public Method {
 public:
  explicit ByGraph(Gpus& gpus) : stream_(gpus, false, Priority::kLowest) {
    const auto create = find<int(void**, unsigned)>({"cuGraphCreate"});
    const auto add = find<int(void**, void*, const void*, size_t, const KernelNode*)>({"cuGraphAddKernelNode_v2"});
    const auto instantiate = find<int(void**, void*, unsigned long long)>({"cuGraphInstantiateWithFlags"});
    must_cuda(create(&graph_, 0), "cuGraphCreate");
    void* arguments[] = {&first_};
    first_.finished = nullptr;
    const KernelNode node = describe(1, static_cast<void**>(arguments));
    must_cuda(add(&node_, graph_, nullptr, 0, &node), "cuGraphAddKernelNode");
    must_cuda(instantiate(&executable_, graph_, 0), "cuGraphInstantiateWithFlags");
  }
  void post(std::span<const PageCopy> pages) override {
    in_parts(pages, kInlinePages, [this](std::span<const PageCopy> part) {
      void* arguments[] = {&stream_.fill(part)};
      const KernelNode node = describe(stream_.blocks(), static_cast<void**>(arguments));
      must_cuda(set_(executable_, node_, &node), "cuGraphExecKernelNodeSetParams");
      must_cuda(launch_(executable_, stream_.stream()), "cuGraphLaunch");
    });
  }
  bool done() override { return stream_.done(); }

 private:
  KernelNode describe(uint32_t blocks, void** arguments) const {
    return {stream_.function(), {blocks, 1, 1}, {32, 1, 1}, stream_.shared(), arguments, nullptr, nullptr, nullptr};
  }

  InlineStream stream_;
  InlineLaunch first_{};
  void* graph_ = nullptr;
  void* node_ = nullptr;
  void* executable_ = nullptr;
  int (*const set_)(void*, void*, const KernelNode*) =
      find<int(void*, void*, const KernelNode*)>({"cuGraphExecKernelNodeSetParams_v2"});
  int (*const launch_)(void*, cuda::Stream) = find<int(void*, cuda::Stream)>({"cuGraphLaunch"});
};

// --- Launched beforehand: each waits in its stream, on no SM, for a word that the host stores

class Waiting final : public Method {
 public:
  explicit Waiting(Gpus& gpus)
      : driver_(gpus.driver),
        function_(gpus.function("bench_waiting_small", kSmallShared)),
        stream_(must(OwnedStream::create(driver_, Priority::kLowest))),
        gate_(must(PinnedMemory::allocate(driver_, kLine))),
        finished_(must(PinnedMemory::allocate(driver_, kMaxBlocks * sizeof(uint64_t)))),
        lists_(must(PinnedMemory::allocate(driver_, kReady * sizeof(WaitingLaunch)))) {
    prepare();
  }
  ~Waiting() override {  // those that still wait find nothing to do
    for (uint64_t number = posted_; number < launched_; ++number) list(number)->count = 0;
    gate_.word().store(launched_);
    driver_.cuStreamSynchronize(stream_.get());
  }
  void post(std::span<const PageCopy> pages) override {
    in_parts(pages, kInlinePages, [this](std::span<const PageCopy> part) {
      if (posted_ == launched_) {
        while (!done()) sched_yield();
        prepare();
      }
      WaitingLaunch* to = list(posted_);
      std::copy(part.begin(), part.end(), to->pages);
      to->count = part.size();
      gate_.word().store(++posted_, std::memory_order_release);
    });
  }
  bool done() override {
    for (uint32_t block = 0; block < kWaitingBlocks; ++block) {
      if (finished_.word(block * sizeof(uint64_t)).load(std::memory_order_acquire) < posted_) return false;
    }
    return true;
  }
  // How many blocks it takes is decided before its pages are known.
  void prepare() override {
    for (; launched_ < posted_ + kReady; ++launched_) {
      must_cuda(wait_(stream_.get(), gate_.device(), launched_ + 1, 0), "cuStreamWaitValue64");
      DevicePointer pages = lists_.device() + launched_ % kReady * sizeof(WaitingLaunch);
      DevicePointer finished = finished_.device();
      uint64_t page_bytes = kPage;
      uint64_t sequence = launched_ + 1;
      void* arguments[] = {&pages, &page_bytes, &finished, &sequence};
      must_cuda(driver_.cuLaunchKernel(function_, kWaitingBlocks, 1, 1, 32, 1, 1, kSmallShared, stream_.get(),
                                       static_cast<void**>(arguments), nullptr),
                "cuLaunchKernel");
    }
  }

 private:
  static constexpr uint64_t kReady = 8;
  static constexpr uint32_t kWaitingBlocks = 16;
  WaitingLaunch* list(uint64_t number) { return static_cast<WaitingLaunch*>(lists_.data()) + number % kReady; }

  const Driver& driver_;
  const Function function_;
  const OwnedStream stream_;
  const PinnedMemory gate_;
  const PinnedMemory finished_;
  const PinnedMemory lists_;
  int (*const wait_)(cuda::Stream, DevicePointer, uint64_t,
                     unsigned) = find<int(cuda::Stream, DevicePointer, uint64_t, unsigned)>({"cuStreamWaitValue64_v2"});
  uint64_t posted_ = 0;
  uint64_t launched_ = 0;
};

// --- A kernel that stays

class Resident final : public Method {
 public:
  Resident(Gpus& gpus, bool large, uint32_t blocks)
      : driver_(gpus.driver),
        blocks_(blocks),
        stream_(must(OwnedStream::create(driver_, Priority::kLowest))),
        ring_(must(PinnedMemory::allocate(driver_, sizeof(Ring)))),
        finished_(must(PinnedMemory::allocate(driver_, kMaxBlocks * sizeof(uint64_t)))) {
    const uint32_t shared = large ? kLargeShared : kSmallShared;
    const Function function = gpus.function(large ? "bench_resident_large" : "bench_resident_small", shared);
    DevicePointer ring = ring_.device();
    DevicePointer finished = finished_.device();
    uint64_t page_bytes = kPage;
    uint64_t life_ns = 60'000'000'000;  // should this process hang
    void* arguments[] = {&ring, &finished, &page_bytes, &life_ns};
    must_cuda(driver_.cuLaunchKernel(function, blocks, 1, 1, 32, 1, 1, shared, stream_.get(),
                                     static_cast<void**>(arguments), nullptr),
              "cuLaunchKernel");
  }
  ~Resident() override {
    while (!done()) sched_yield();
    store(slot(posted_)[0].source, kStopMark << 48);
    driver_.cuStreamSynchronize(stream_.get());
  }
  void post(std::span<const PageCopy> pages) override {
    in_parts(pages, kSlotPages, [this](std::span<const PageCopy> part) {
      while (!has_room()) sched_yield();
      PageCopy* to = slot(posted_);
      const uint64_t mark = slot_mark(posted_, static_cast<uint32_t>(part.size())) << 48;
      for (size_t i = part.size(); i-- > 0;) {
        store(to[i].target, part[i].target | mark);
        store(to[i].source, part[i].source | mark);
      }
      ++posted_;
    });
  }
  bool done() override { return ended(posted_); }

 private:
  static void store(uint64_t& word, uint64_t value) {
    std::atomic_ref<uint64_t>(word).store(value, std::memory_order_release);
  }
  PageCopy* slot(uint64_t number) { return static_cast<Ring*>(ring_.data())->slots[number % kSlots]; }
  bool ended(uint64_t count) const {
    for (uint32_t block = 0; block < blocks_; ++block) {
      if (finished_.word(block * sizeof(uint64_t)).load(std::memory_order_acquire) < count) return false;
    }
    return true;
  }
  bool has_room() const { return posted_ < kSlots || ended(posted_ - kSlots + 1); }

  const Driver& driver_;
  const uint32_t blocks_;
  const OwnedStream stream_;
  const PinnedMemory ring_;
  const PinnedMemory finished_;
  uint64_t posted_ = 0;
};

// --- Copy engines

class CopyEngines : public Method {
 public:
  CopyEngines(Gpus& gpus, uint32_t streams)
      : driver_(gpus.driver), words_(must(PinnedMemory::allocate(driver_, streams * kLine))) {
    for (uint32_t i = 0; i < streams; ++i) streams_.push_back(must(OwnedStream::create(driver_, Priority::kLowest)));
  }
  void post(std::span<const PageCopy> pages) override {
    ++posted_;
    used_ = std::min(pages.size(), streams_.size());
    for (size_t i = 0; i < used_; ++i) {
      for (size_t at = i; at < pages.size(); at += used_) {
        must_cuda(driver_.cuMemcpyDtoDAsync_v2(pages[at].target, pages[at].source, kPage, streams_[i].get()), "DtoD");
      }
      end(i);
    }
  }
  bool done() override {
    for (size_t i = 0; i < used_; ++i) {
      if (words_.word(i * kLine).load(std::memory_order_acquire) < posted_) return false;
    }
    return true;
  }

 protected:
  void end(size_t i) {
    must_cuda(driver_.cuStreamWriteValue64_v2(streams_[i].get(), words_.device() + i * kLine, posted_, 0),
              "WriteValue");
  }

  const Driver& driver_;
  const PinnedMemory words_;
  std::vector<OwnedStream> streams_;
  size_t used_ = 0;
  uint64_t posted_ = 0;
};

// CUmemcpyAttributes
struct CopyAttributes {
  int order;
  int source_hint[2];
  int target_hint[2];
  unsigned flags;
};
static_assert(sizeof(CopyAttributes) == 24);

class CopyBatch final : public CopyEngines {
 public:
  explicit CopyBatch(Gpus& gpus) : CopyEngines(gpus, 1) {
    if (void* second = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "cuMemcpyBatchAsync_v2")) {
      second_ = reinterpret_cast<decltype(second_)>(second);
    } else {
      first_ = find<std::remove_pointer_t<decltype(first_)>>({"cuMemcpyBatchAsync"});
    }
  }
  void post(std::span<const PageCopy> pages) override {
    ++posted_;
    used_ = 1;
    targets_.clear();
    sources_.clear();
    for (const PageCopy& page : pages) {
      targets_.push_back(page.target);
      sources_.push_back(page.source);
    }
    sizes_.assign(pages.size(), kPage);
    CopyAttributes attributes{1, {}, {}, 1};  // in the stream's order; beside computation
    size_t index = 0;
    size_t failed = 0;
    const cuda::Stream stream = streams_[0].get();
    must_cuda(second_ != nullptr ? second_(targets_.data(), sources_.data(), sizes_.data(), pages.size(), &attributes,
                                           &index, 1, stream)
                                 : first_(targets_.data(), sources_.data(), sizes_.data(), pages.size(), &attributes,
                                          &index, 1, &failed, stream),
              "cuMemcpyBatchAsync");
    end(0);
  }

 private:
  int (*second_)(DevicePointer*, DevicePointer*, size_t*, size_t, CopyAttributes*, size_t*, size_t,
                 cuda::Stream) = nullptr;
  int (*first_)(DevicePointer*, DevicePointer*, size_t*, size_t, CopyAttributes*, size_t*, size_t, size_t*,
                cuda::Stream) = nullptr;
  std::vector<DevicePointer> targets_;
  std::vector<DevicePointer> sources_;
  std::vector<size_t> sizes_;
};

using Maker = std::function<std::unique_ptr<Method>(Gpus&)>;
template <typename M, typename... Args>
Maker maker(Args... args) {
  return [=](Gpus& gpus) { return std::make_unique<M>(gpus, args...); };
}
const std::vector<std::pair<std::string, Maker>>& makers() {
  static const std::vector<std::pair<std::string, Maker>> all = {
      {"copier", maker<ByCopier>()},
      {"inline large", maker<Inline>(true, Priority::kLowest)},
      {"inline small", maker<Inline>(false, Priority::kLowest)},
      {"inline small high", maker<Inline>(false, Priority::kHighest)},
      {"inline small carve", maker<Inline>(false, Priority::kHighest, true)},
      {"graph small", maker<ByGraph>()},
      {"waiting small", maker<Waiting>()},
      {"resident small 1", maker<Resident>(false, 1U)},
      {"resident small 2", maker<Resident>(false, 2U)},
      {"resident small 4", maker<Resident>(false, 4U)},
      {"resident small 8", maker<Resident>(false, 8U)},
      {"resident large 8", maker<Resident>(true, 8U)},
      {"engines 1", maker<CopyEngines>(1U)},
      {"engines 2", maker<CopyEngines>(2U)},
      {"engines 4", maker<CopyEngines>(4U)},
      {"engines batch", maker<CopyBatch>()},
  };
  return all;
}

}  // namespace

Gpus::Gpus()
    : sender(must(cuda::Context::retain(0))),
      receiver(must(cuda::Context::retain(1))),
      driver(sender->driver()),
      scope(*sender) {
  if (candidates_image().empty()) die("this build holds no GPU kernels: nvcc was not found when it was built");
  if (sender->attribute(cuda::kAttributeMajor) < 9)
    die("the candidates need a Hopper GPU, and this is " + sender->name());
  const int enabled = driver.cuCtxEnablePeerAccess(receiver->handle(), 0);
  if (enabled != cuda::kPeerAccessAlreadyEnabled) must_cuda(enabled, "cuCtxEnablePeerAccess");
  must_cuda(driver.cuModuleLoadData(&module, candidates_image().data()), "cuModuleLoadData");
  load_words = must(PinnedMemory::allocate(driver, kLine));
}
Gpus::~Gpus() {
  load_words = {};
  driver.cuModuleUnload(module);
}

Function Gpus::function(const char* name, uint32_t shared_bytes, bool carve_out) const {
  constexpr int kMaxDynamicShared = 8;   // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  constexpr int kPreferredCarveOut = 9;  // CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in per cent
  Function found = nullptr;
  must_cuda(driver.cuModuleGetFunction(&found, module, name), name);
  if (carve_out) must_cuda(driver.cuFuncSetAttribute(found, kPreferredCarveOut, 100), name);
  if (shared_bytes > 0) {
    must_cuda(driver.cuFuncSetAttribute(found, kMaxDynamicShared, static_cast<int>(shared_bytes)), name);
  }
  return found;
}

std::vector<std::string> method_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : makers()) names.push_back(name);
  return names;
}

std::unique_ptr<Method> make_method(const std::string& name, Gpus& gpus) {
  for (const auto& [known, make] : makers()) {
    if (known == name) return make(gpus);
  }
  die("no method " + name);
}

}  // namespace kvc::gpu_bench
