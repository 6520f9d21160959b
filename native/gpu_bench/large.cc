#include "gpu_bench/large.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <vector>

#include "cuda/copier.h"
#include "gpu_bench/gpus.h"
#include "gpu_bench/support.h"

namespace kvc::gpu_bench {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kPool = 4ULL << 30;  // long beside what a launch takes
constexpr int kRounds = 7;

// Median GB/s of what `copy` does with all of the pool.
template <typename Copy>
double rate(Copy&& copy) {
  std::vector<double> rates;
  for (int round = 0; round <= kRounds; ++round) {
    const int64_t begin = now_ns();
    copy();
    if (round > 0) rates.push_back(static_cast<double>(kPool) / static_cast<double>(now_ns() - begin));
  }
  return percentile(rates, 0.5);
}

void report(const char* by, uint64_t page, uint64_t launch, size_t streams, double gb_s) {
  std::printf(
      "{\"bench\": \"large\", \"by\": \"%s\", \"page MiB\": %.3f, \"launch MiB\": %.0f, \"streams\": %zu, "
      "\"GB/s\": %.1f}\n",
      by, static_cast<double>(page) / kMiB, static_cast<double>(launch) / kMiB, streams, gb_s);
}

// Launches of as many pages as fit, a word of the host's behind each, on several streams in turn.
double by_engines(const Gpus& gpus, const Buffer& source, const Buffer& target, uint64_t page, uint64_t launch,
                  size_t streams) {
  const cuda::Driver& driver = gpus.driver;
  std::vector<cuda::OwnedStream> owned;
  for (size_t i = 0; i < streams; ++i) {
    owned.push_back(must(cuda::OwnedStream::create(driver, cuda::OwnedStream::Priority::kLowest)));
  }
  const auto words = must(cuda::PinnedMemory::allocate(driver, 64 * streams));
  std::vector<cuda::DevicePointer> sources;
  std::vector<cuda::DevicePointer> targets;
  std::vector<size_t> sizes;
  return rate([&] {
    size_t number = 0;
    for (uint64_t at = 0; at < kPool; ++number) {
      const cuda::Stream stream = owned[number % streams].get();
      sources.clear();
      targets.clear();
      for (const uint64_t end = std::min(at + launch, kPool); at + page <= end; at += page) {
        sources.push_back(source.address + at);
        targets.push_back(target.address + kPool - at - page);
      }
      sizes.assign(sources.size(), page);
      cuda::CopyAttributes attributes{1, {}, {}, 1};  // as the Copier's
      size_t first = 0;
      size_t failed = 0;
      must_cuda(driver.cuMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(), &attributes,
                                          &first, 1, &failed, stream),
                "cuMemcpyBatchAsync");
      must_cuda(driver.cuStreamWriteValue64_v2(stream, words.device() + number % streams * 64, number, 0),
                "cuStreamWriteValue64");
      if (at + page > kPool) break;
    }
    for (const auto& stream : owned) must_cuda(driver.cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
  });
}

// As a domain has it: the Copier, launch after launch.
double by_copier(const Gpus& gpus, const Buffer& source, const Buffer& target, uint64_t page, bool engines) {
  auto& table = const_cast<cuda::Driver&>(gpus.driver);  // this process's own copy of the driver's addresses
  const auto batches = table.cuMemcpyBatchAsync;
  if (!engines) table.cuMemcpyBatchAsync = nullptr;
  constexpr uint32_t kBlocks = 16;  // DomainConfig::copy_blocks
  const auto copier = must(cuda::Copier::open(gpus.sender, kBlocks));
  table.cuMemcpyBatchAsync = batches;
  return rate([&] {
    for (uint64_t at = 0; at + page <= kPool;) {
      while (!copier->can_begin()) copier->finished();
      copier->begin(page);
      for (; at + page <= kPool && copier->has_room(1); at += page) {
        copier->add(source.address + at, target.address + kPool - at - page);
      }
      must(copier->launch());
    }
    while (!copier->idle()) sched_yield();
  });
}

}  // namespace

void large() {
  const Gpus gpus;
  const Buffer source(gpus.sender, kPool, 1);
  Buffer target(gpus.receiver, kPool, 2);
  report("one plain copy", kPool, kPool, 1, by_engines(gpus, source, target, kPool, kPool, 1));
  for (const uint64_t page : {1 * kMiB, 2 * kMiB, 3 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB, 32 * kMiB}) {
    for (const bool engines : {true, false}) {
      report(engines ? "copier" : "copier, kernel", page, cuda::kLaunchBytes, cuda::kStreams,
             by_copier(gpus, source, target, page, engines));
    }
    for (const uint64_t launch : {32 * kMiB, 64 * kMiB, 128 * kMiB}) {
      for (const size_t streams : {1, 2, 4}) {
        report("engines", page, launch, streams, by_engines(gpus, source, target, page, launch, streams));
      }
    }
  }
}

}  // namespace kvc::gpu_bench
