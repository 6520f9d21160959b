#include "bench/gpu/latency.h"

#include <array>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bench/gpu/gpus.h"
#include "bench/gpu/load.h"
#include "bench/gpu/support.h"
#include "bench/gpu/ways.h"
#include "cuda/copier.h"

namespace kvc::gpu_bench {
namespace {

using cuda::PageCopy;

constexpr uint64_t kPage = 64 << 10;
constexpr uint64_t kPool = 256 << 20;
constexpr size_t kLargePages = (64 << 20) / kPage;

struct Pages {
  Pages(const Buffer& source, const Buffer& target)
      : from(permutation(kPool / kPage, 1)), to(permutation(kPool / kPage, 2)) {
    for (size_t i = 0; i < from.size(); ++i) {
      copies.push_back({source.address + static_cast<uint64_t>(from[i]) * kPage,
                        target.address + static_cast<uint64_t>(to[i]) * kPage});
    }
  }
  // Returns the next pages, so that no round reads what the previous one has left in a cache.
  std::span<const PageCopy> next(size_t count) {
    if (at + count > copies.size()) at = 0;
    at += count;
    return std::span(copies).subspan(at - count, count);
  }
  std::vector<int64_t> from;
  std::vector<int64_t> to;
  std::vector<PageCopy> copies;
  size_t at = 0;
};

// Returns the time of each copy in us, one copy at a time.
std::vector<double> times(Way& way, Pages& pages, size_t count, int rounds) {
  std::vector<double> us;
  const int64_t end = now_ns() + 80'000'000;
  for (int round = 0; round < rounds && (round < 8 || now_ns() < end); ++round) {
    const auto batch = pages.next(count);
    // Starts at a varying point of the load's kernels.
    for (const int64_t until = now_ns() + 20'000 + round % 16 * 5'000; now_ns() < until;) {
    }
    const int64_t begin = now_ns();
    way.post(batch);
    wait(way);
    if (round >= 3) us.push_back(static_cast<double>(now_ns() - begin) / 1e3);
  }
  return us;
}

void measure_times(const char* name, Way& way, const Gpus& gpus, const Buffer& source, Buffer& target) {
  Pages pages(source, target);
  target.fill(2);
  constexpr std::array<size_t, 5> kCounts = {1, 4, 16, 32, 64};
  for (const size_t count : kCounts) {
    way.post(pages.next(count));
    wait(way);
  }
  way.post(pages.next(kLargePages));
  wait(way);
  const auto copied = static_cast<int64_t>(pages.at);
  check_pages(source.read(), target.read(), kPage, {pages.from.begin(), pages.from.begin() + copied}, pages.to);

  for (const Load::Kind kind : Load::kKinds) {
    const Load load(gpus, kind, source);
    if (kind != Load::Kind::kNone) load.kernel_us(20'000'000, [] {});
    std::string row;
    for (const size_t count : kCounts) {
      const auto us = times(way, pages, count, 203);
      std::printf(
          "{\"bench\": \"latency\", \"by\": \"%s\", \"load\": \"%s\", \"pages\": %zu, \"n\": %zu, \"us p50\": %.1f, "
          "\"p90\": %.1f, \"p99\": %.1f}\n",
          name, Load::name(kind), count, us.size(), percentile(us, 0.5), percentile(us, 0.9), percentile(us, 0.99));
      char cell[32];
      std::snprintf(cell, sizeof(cell), " %7.1f", percentile(us, 0.5));
      row += cell;
    }
    const auto us = times(way, pages, kLargePages, 43);
    const double rate = static_cast<double>(kLargePages * kPage) / percentile(us, 0.5) / 1e3;
    std::printf("{\"bench\": \"latency\", \"by\": \"%s\", \"load\": \"%s\", \"pages\": %zu, \"GB/s\": %.1f}\n", name,
                Load::name(kind), kLargePages, rate);
    std::fprintf(stderr, "%-8s %-10s %s %8.0f\n", name, Load::name(kind), row.c_str(), rate);
  }
}

// Measures how much longer the load's kernels take beside copies: 16 pages every 100 us, and 64 MiB after 64 MiB. The
// load alone is measured before and after.
void measure_cost(const char* name, Way& way, const Gpus& gpus, const Buffer& source, const Buffer& target) {
  constexpr int64_t kTime = 50'000'000;
  Pages pages(source, target);
  const auto nothing = [] {};
  for (const Load::Kind kind : Load::kKinds) {
    if (kind == Load::Kind::kNone) continue;
    const Load load(gpus, kind, source);
    load.kernel_us(kTime / 2, nothing);
    const double before = load.kernel_us(kTime, nothing);
    // Copies `count` pages at a time, one copy every `every_ns` at most. Returns the load's time and the copies' GB/s.
    const auto with = [&](size_t count, int64_t every_ns) {
      const int64_t begun = now_ns();
      int64_t next = 0;
      uint64_t posted = 0;
      const double us = load.kernel_us(kTime, [&] {
        const int64_t now = now_ns();
        if (now < next || !way.done()) return;
        next = now + every_ns;
        way.post(pages.next(count));
        ++posted;
      });
      const auto bytes = static_cast<double>(posted * count * kPage);
      const double rate = bytes / static_cast<double>(now_ns() - begun);
      wait(way);
      return std::pair{us, rate};
    };
    const auto [small, small_rate] = with(16, 100'000);
    const auto [large, large_rate] = with(kLargePages, 0);
    const double after = load.kernel_us(kTime, nothing);
    std::printf(
        "{\"bench\": \"cost\", \"by\": \"%s\", \"load\": \"%s\", \"kernel us alone\": %.2f, \"alone after\": %.2f, "
        "\"16 "
        "pages each 100 us\": %.2f, \"GB/s\": %.2f, \"64 MiB\": %.2f, \"64 MiB GB/s\": %.1f}\n",
        name, Load::name(kind), before, after, small, small_rate, large, large_rate);
    const double alone = (before + after) / 2;
    std::fprintf(stderr,
                 "%-8s %-10s longer by %.1f %% (16 pages each 100 us, %.1f GB/s), %.1f %% (64 MiB, %.0f GB/s)\n", name,
                 Load::name(kind), 100 * (small / alone - 1), small_rate, 100 * (large / alone - 1), large_rate);
  }
}

}  // namespace

void latency() {
  const Gpus gpus;
  const Buffer source(gpus.sender, kPool, 1);
  Buffer target(gpus.receiver, kPool, 2);
  const auto measure = [&](const char* name, std::unique_ptr<Way> way) {
    measure_times(name, *way, gpus, source, target);
    measure_cost(name, *way, gpus, source, target);
  };
  std::fprintf(stderr, "us p50 of 1, 4, 16, 32, 64 pages of 64 KiB; GB/s of 1,024\n");
  measure("kernel", std::make_unique<ByCopier>(gpus, false, kPage));
  measure("engines", std::make_unique<ByEngines>(gpus, kPage));
  measure("copier", std::make_unique<ByCopier>(gpus, true, kPage));
}

}  // namespace kvc::gpu_bench
