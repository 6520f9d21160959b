// Helpers that all measurements of kvc_gpu_bench use: fatal errors, memory of a GPU, and statistics.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cuda/driver.h"

namespace kvc::gpu_bench {

using Clock = std::chrono::steady_clock;

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

[[noreturn]] inline void die(const std::string& what) {
  std::fprintf(stderr, "kvc_gpu_bench: %s\n", what.c_str());
  std::fflush(nullptr);
  std::_Exit(1);  // ends without destructors, which would wait for kernels that are still running
}
template <typename T>
T must(Result<T> result) {
  if (!result) die(result.error().to_string());
  return std::move(result.value());
}
inline void must(Status status) {
  if (!status) die(status.error().to_string());
}
inline void must_cuda(int result, const char* call) {
  if (result != cuda::kSuccess) die(cuda::cuda_error("bench", call, result).to_string());
}

inline double percentile(std::vector<double> values, double p) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(p * static_cast<double>(values.size())))];
}
inline double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Memory of one GPU, filled with random bytes.
struct Buffer {
  Buffer(std::shared_ptr<cuda::Context> gpu, uint64_t size, uint64_t seed) : context(std::move(gpu)), bytes(size) {
    const cuda::Context::Scope scope(*context);
    must_cuda(context->driver().cuMemAlloc_v2(&address, bytes), "cuMemAlloc");
    fill(seed);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    const cuda::Context::Scope scope(*context);
    context->driver().cuMemFree_v2(address);
  }
  void fill(uint64_t seed) {
    constexpr uint64_t kPiece = 64 << 20;
    std::vector<uint64_t> words(std::min(bytes, kPiece) / 8);
    std::mt19937_64 random(seed);
    std::generate(words.begin(), words.end(), random);
    const cuda::Context::Scope scope(*context);
    for (uint64_t at = 0; at < bytes; at += kPiece) {
      words[0] = seed + at;
      must_cuda(context->driver().cuMemcpyHtoD_v2(address + at, words.data(), std::min(kPiece, bytes - at)), "HtoD");
    }
  }
  std::vector<std::byte> read() const {
    std::vector<std::byte> copy(bytes);
    const cuda::Context::Scope scope(*context);
    must_cuda(context->driver().cuMemcpyDtoH_v2(copy.data(), address, bytes), "DtoH");
    return copy;
  }
  std::byte* data() const { return reinterpret_cast<std::byte*>(address); }

  const std::shared_ptr<cuda::Context> context;
  const uint64_t bytes;
  cuda::DevicePointer address = 0;
};

inline std::vector<int64_t> permutation(size_t count, uint64_t seed) {
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  return order;
}

inline void check_pages(const std::vector<std::byte>& source, const std::vector<std::byte>& target, uint64_t page,
                        const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  for (size_t i = 0; i < from.size(); ++i) {
    if (std::memcmp(source.data() + static_cast<uint64_t>(from[i]) * page,
                    target.data() + static_cast<uint64_t>(to[i]) * page, page) != 0) {
      die("page " + std::to_string(i) + " of " + std::to_string(page) + " bytes differs");
    }
  }
}

}  // namespace kvc::gpu_bench
