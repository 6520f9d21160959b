#include "gpu_bench/latency.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu_bench/load.h"
#include "gpu_bench/methods.h"
#include "gpu_bench/support.h"

namespace kvc::gpu_bench {
namespace {

constexpr uint64_t kPage = Method::kPage;
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
  // The next of them, so that no round reads what the one before has left in a cache.
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

void wait(Method& method) {
  const int64_t deadline = now_ns() + 2'000'000'000;
  while (!method.done()) {
    if (now_ns() > deadline) die("a copy takes longer than 2 s");
  }
}

void pause(int64_t nanoseconds) {
  for (const int64_t until = now_ns() + nanoseconds; now_ns() < until;) {
  }
}

// In us, each copy by itself.
std::vector<double> times(Method& method, Pages& pages, size_t count, int rounds, int64_t longest_ns) {
  std::vector<double> us;
  const int64_t end = now_ns() + longest_ns;
  for (int round = 0; round < rounds && (round < 8 || now_ns() < end); ++round) {
    const auto batch = pages.next(count);
    method.prepare();
    pause(20'000 + round % 16 * 5'000);  // at any point of the load's kernels
    const int64_t begin = now_ns();
    method.post(batch);
    wait(method);
    if (round >= 3) us.push_back(static_cast<double>(now_ns() - begin) / 1e3);
  }
  return us;
}

// Copies of `count` pages one after the other, one every `every_ns` at most.
struct Paced {
  Method& method;
  Pages& pages;
  size_t count;
  int64_t every_ns;
  int64_t begun = now_ns();
  int64_t next = 0;
  uint64_t posted = 0;
  void operator()() {
    const int64_t now = now_ns();
    if (now < next || !method.done()) return;
    next = now + every_ns;
    method.prepare();
    method.post(pages.next(count));
    ++posted;
  }
  double gigabytes_a_second() const {
    return static_cast<double>(posted * count * kPage) / static_cast<double>(now_ns() - begun);
  }
};

void measure_times(const std::string& name, Gpus& gpus, const Buffer& source, const Buffer& target) {
  Pages pages(source, target);
  auto method = make_method(name, gpus);

  for (const size_t count : {1, 4, 16, 64, 1024}) {  // 1,109 pages of the pool, each once
    method->prepare();
    method->post(pages.next(count));
    wait(*method);
  }
  const size_t copied = pages.at;
  check_pages(source.read(), target.read(), kPage,
              {pages.from.begin(), pages.from.begin() + static_cast<int64_t>(copied)}, pages.to);

  std::string row;
  using Kind = Load::Kind;
  for (const Kind kind : {Kind::kNone, Kind::kPersistent, Kind::kTiled, Kind::kStream}) {
    const Load load(gpus, kind, source);
    if (kind != Kind::kNone) load.kernel_us(20'000'000, [] {});
    const auto counts = kind == Kind::kNone ? std::vector<size_t>{1, 4, 16, 64} : std::vector<size_t>{1, 16};
    for (const size_t count : counts) {
      const auto us = times(*method, pages, count, 203, 80'000'000);
      std::printf(
          "{\"bench\": \"latency\", \"method\": \"%s\", \"load\": \"%s\", \"pages\": %zu, \"n\": %zu, \"us p50\": "
          "%.1f, "
          "\"p90\": %.1f, \"p99\": %.1f}\n",
          name.c_str(), Load::name(kind), count, us.size(), percentile(us, 0.5), percentile(us, 0.9),
          percentile(us, 0.99));
      char cell[32];
      std::snprintf(cell, sizeof(cell), " %6.1f", percentile(us, 0.5));
      row += cell;
    }
    const auto us = times(*method, pages, kLargePages, 43, 60'000'000);
    const double rate = static_cast<double>(kLargePages * kPage) / percentile(us, 0.5) / 1e3;
    std::printf("{\"bench\": \"latency\", \"method\": \"%s\", \"load\": \"%s\", \"pages\": %zu, \"GB/s\": %.1f}\n",
                name.c_str(), Load::name(kind), kLargePages, rate);
    char cell[32];
    std::snprintf(cell, sizeof(cell), " %5.0f |", rate);
    row += cell;
  }
  std::fprintf(stderr, "T %-18s%s\n", name.c_str(), row.c_str());
}

// How much longer the load's kernels take: with the method there but nothing to copy, with 16 pages every 100 us, and with
// 64 MiB after 64 MiB. The load alone is measured before and after each.
void measure_cost(const std::string& name, Gpus& gpus, const Buffer& source, const Buffer& target) {
  Pages pages(source, target);
  constexpr int64_t kTime = 50'000'000;
  std::string row;
  using Kind = Load::Kind;
  for (const Kind kind : {Kind::kPersistent, Kind::kTiled, Kind::kStream}) {
    const Load load(gpus, kind, source);
    const auto nothing = [] {};
    load.kernel_us(kTime / 2, nothing);
    double alone = load.kernel_us(kTime, nothing);
    double with[3] = {};
    double rates[3] = {};
    {
      auto method = make_method(name, gpus);
      load.kernel_us(kTime / 10, nothing);
      with[0] = load.kernel_us(kTime, nothing);
      Paced small{*method, pages, 16, 100'000};
      with[1] = load.kernel_us(kTime, small);
      rates[1] = small.gigabytes_a_second();
      wait(*method);
      Paced large{*method, pages, kLargePages, 0};
      with[2] = load.kernel_us(kTime, large);
      rates[2] = large.gigabytes_a_second();
      wait(*method);
    }
    const double after = load.kernel_us(kTime, nothing);
    std::printf(
        "{\"bench\": \"cost\", \"method\": \"%s\", \"load\": \"%s\", \"kernel us alone\": %.2f, \"alone after\": %.2f, "
        "\"idle\": %.2f, \"16 pages each 100 us\": %.2f, \"GB/s\": %.2f, \"64 MiB\": %.2f, \"64 MiB GB/s\": %.1f}\n",
        name.c_str(), Load::name(kind), alone, after, with[0], with[1], rates[1], with[2], rates[2]);
    alone = (alone + after) / 2;
    char cell[96];
    std::snprintf(cell, sizeof(cell), " %+6.1f%% %+6.1f%% (%4.1f) %+6.1f%% (%3.0f) |", 100 * (with[0] / alone - 1),
                  100 * (with[1] / alone - 1), rates[1], 100 * (with[2] / alone - 1), rates[2]);
    row += cell;
  }
  std::fprintf(stderr, "C %-18s%s\n", name.c_str(), row.c_str());
}

// In a process of its own, so that a method that fails or hangs is no other's concern. Before anything of CUDA.
int in_child(const std::string& name) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    constexpr unsigned kLongest = 20;  // s
    alarm(kLongest);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);  // or the first use of a kernel waits for one that stays
    {
      Gpus gpus;
      const Buffer source(gpus.sender, kPool, 1);
      const Buffer target(gpus.receiver, kPool, 2);
      measure_times(name, gpus, source, target);
      measure_cost(name, gpus, source, target);
    }
    std::fflush(stdout);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (status == 0) return 0;
  std::fprintf(stderr, "%-18s failed (status %d)\n", name.c_str(), status);
  return 1;
}

}  // namespace

int latency(const char* only) {
  const std::vector<std::string> names = only != nullptr ? std::vector<std::string>{only} : method_names();
  int failed = 0;
  std::fprintf(
      stderr,
      "T: us p50 of 1, 4, 16, 64 pages of 64 KiB and GB/s of 1,024, GPU idle | 1, 16 pages and GB/s beside "
      "persistent | tiled | stream\n"
      "C: the load's kernels, longer by: method idle, 16 pages each 100 us (GB/s), 64 MiB (GB/s); persistent | "
      "tiled | stream\n");
  for (const std::string& name : names) failed += in_child(name);
  return failed;
}

}  // namespace kvc::gpu_bench
