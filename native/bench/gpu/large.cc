#include "bench/gpu/large.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <initializer_list>
#include <span>
#include <vector>

#include "bench/gpu/gpus.h"
#include "bench/gpu/support.h"
#include "bench/gpu/ways.h"
#include "cuda/copier.h"

namespace kvc::gpu_bench {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kPool = 4ULL << 30;  // takes long compared with a launch
constexpr int kRounds = 7;

// Returns the median GB/s at which `copy` copies the whole pool.
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

// Returns the pages of the whole pool. Their order at the target is reversed.
std::vector<cuda::PageCopy> pages_of(const Buffer& source, const Buffer& target, uint64_t page) {
  std::vector<cuda::PageCopy> pages;
  for (uint64_t at = 0; at + page <= kPool; at += page) {
    pages.push_back({source.address + at, target.address + kPool - at - page});
  }
  return pages;
}

// Copies by the copy engines, in launches of as many pages as fit, on several streams in turn.
double by_engines(const Gpus& gpus, const std::vector<cuda::PageCopy>& pages, uint64_t page, uint64_t launch,
                  size_t streams) {
  std::deque<ByEngines> ways;
  for (size_t i = 0; i < streams; ++i) ways.emplace_back(gpus, page);
  const size_t step = launch / page;
  return rate([&] {
    for (size_t at = 0, number = 0; at < pages.size(); at += step, ++number) {
      ways[number % streams].post(std::span(pages).subspan(at, std::min(step, pages.size() - at)));
    }
    for (ByEngines& way : ways) wait(way);
  });
}

// Copies by the Copier as a domain does, launch after launch.
double by_copier(const Gpus& gpus, const std::vector<cuda::PageCopy>& pages, uint64_t page, bool engines) {
  ByCopier way(gpus, engines, page);
  return rate([&] {
    way.post(pages);
    wait(way);
  });
}

}  // namespace

void large() {
  const Gpus gpus;
  const Buffer source(gpus.sender, kPool, 1);
  Buffer target(gpus.receiver, kPool, 2);
  report("one plain copy", kPool, kPool, 1, by_engines(gpus, pages_of(source, target, kPool), kPool, kPool, 1));
  for (const uint64_t page : {1 * kMiB, 2 * kMiB, 3 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB, 32 * kMiB}) {
    const std::vector<cuda::PageCopy> pages = pages_of(source, target, page);
    for (const bool engines : {true, false}) {
      report(engines ? "copier" : "copier, kernel", page, cuda::kLaunchBytes, cuda::kStreams,
             by_copier(gpus, pages, page, engines));
    }
    for (const uint64_t launch : {32 * kMiB, 64 * kMiB, 128 * kMiB}) {
      for (const size_t streams : {1, 2, 4}) {
        report("engines", page, launch, streams, by_engines(gpus, pages, page, launch, streams));
      }
    }
  }
}

}  // namespace kvc::gpu_bench
