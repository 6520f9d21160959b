#include "bench/gpu/stages.h"

#include <sched.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/gpu/bench_kernels.h"
#include "bench/gpu/clock_offset.h"
#include "bench/gpu/gpus.h"
#include "cuda/copier.h"

namespace kvc::gpu_bench {
namespace {

// A launch of the Copier, as seen by the transfer thread.
struct Launch {
  int64_t begun = 0;  // cuLaunchKernel, or cuMemcpyBatchAsync
  int64_t returned = 0;
  uint32_t blocks = 0;  // 0: the copy engines copied
};

// Replaces these functions of the driver in this process. Read after a transfer has ended.
struct Hook {
  decltype(cuda::Driver::cuLaunchKernel) launch = nullptr;
  decltype(cuda::Driver::cuMemcpyBatchAsync) copy = nullptr;
  decltype(cuda::Driver::cuModuleGetFunction) get_function = nullptr;
  cuda::Function bulk = nullptr;   // the transfer engine's kvc_copy_bulk
  cuda::Function timed = nullptr;  // launched in its place; null: the transfer engine's own kernel is launched
  cuda::DevicePointer times = 0;   // kMostBlocks BlockTimes per launch
  std::vector<Launch> launches;
};
constexpr size_t kMostLaunches = 16;
constexpr size_t kMostBlocks = 16;  // DomainConfig::copy_blocks
Hook hook;

int get_function(cuda::Function* found, cuda::ModuleHandle module, const char* name) {
  const int result = hook.get_function(found, module, name);
  if (std::string(name) == "kvc_copy_bulk") hook.bulk = *found;
  return result;
}

int launch_kernel(cuda::Function function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared, cuda::Stream stream, void** arguments, void** extra) {
  if (function != hook.bulk || hook.launches.size() == kMostLaunches) {
    return hook.launch(function, x, y, z, block_x, block_y, block_z, shared, stream, arguments, extra);
  }
  cuda::DevicePointer times = hook.times + hook.launches.size() * kMostBlocks * sizeof(BlockTimes);
  void* with_times[] = {arguments[0], &times};
  Launch& launch = hook.launches.emplace_back();
  launch.blocks = x;
  launch.begun = now_ns();
  const int result = hook.timed == nullptr
                         ? hook.launch(function, x, y, z, block_x, block_y, block_z, shared, stream, arguments, extra)
                         : hook.launch(hook.timed, x, y, z, block_x, block_y, block_z, shared, stream,
                                       static_cast<void**>(with_times), extra);
  launch.returned = now_ns();
  return result;
}

int copy_batch(cuda::DevicePointer* targets, cuda::DevicePointer* sources, size_t* lengths, size_t count,
               cuda::CopyAttributes* attributes, size_t* first, size_t attribute_count, size_t* failed,
               cuda::Stream stream) {
  const int64_t begun = now_ns();
  const int result = hook.copy(targets, sources, lengths, count, attributes, first, attribute_count, failed, stream);
  if (hook.launches.size() < kMostLaunches) hook.launches.push_back({begun, now_ns(), 0});
  return result;
}

void primitives(const Gpus& gpus) {
  constexpr int kTimes = 10000;
  const auto each = [](auto&& what) {
    const int64_t begin = now_ns();
    for (int i = 0; i < kTimes; ++i) what();
    return static_cast<double>(now_ns() - begin) / kTimes;
  };
  const double yield = each([] { sched_yield(); });
  const double clock = each([] { (void)now_ns(); });
  const double scope = each([&] { const cuda::Context::Scope mine(*gpus.sender); });
  std::printf("{\"bench\": \"primitives\", \"ns sched_yield\": %.0f, \"clock\": %.0f, \"context scope\": %.0f}\n",
              yield, clock, scope);
}

// Returns the SM's cycles in a microsecond.
double clock_rate(const Gpus& gpus, cuda::Stream stream) {
  const auto out = must(cuda::PinnedMemory::allocate(gpus.driver, 64));
  cuda::DevicePointer address = out.device();
  void* arguments[] = {&address};
  must_cuda(hook.launch(gpus.function("bench_clock_steps", 0), 1, 1, 1, 1, 1, 1, 0, stream,
                        static_cast<void**>(arguments), nullptr),
            "cuLaunchKernel");
  must_cuda(gpus.driver.cuStreamSynchronize(stream), "cuStreamSynchronize");
  const auto* values = static_cast<const uint64_t*>(out.data());
  const double cycles = static_cast<double>(values[2]) / static_cast<double>(values[1]) * 1e3;
  std::printf("{\"bench\": \"clock\", \"GPU's clock steps by ns\": %llu, \"MHz\": %.0f}\n",
              static_cast<unsigned long long>(values[0]), cycles);
  return cycles;
}

class Series {
 public:
  void add(const char* name, double us) {
    for (auto& [known, values] : values_) {
      if (known == name) return values.push_back(us);
    }
    values_.push_back({name, {us}});
  }
  void report(size_t pages, const char* kernel) const {
    for (const auto& [name, us] : values_) {
      std::printf(
          "{\"bench\": \"stages\", \"pages\": %zu, \"kernel\": \"%s\", \"step\": \"%s\", \"us p50\": %.2f, \"p90\": "
          "%.2f}\n",
          pages, kernel, name.c_str(), percentile(us, 0.5), percentile(us, 0.9));
      std::fprintf(stderr, "%5zu pages, %-6s  %-44s %8.2f %8.2f\n", pages, kernel, name.c_str(), percentile(us, 0.5),
                   percentile(us, 0.9));
    }
  }

 private:
  std::vector<std::pair<std::string, std::vector<double>>> values_;
};

}  // namespace

void stages(const Pipe& pipe) {
  constexpr uint64_t kPage = 64 << 10;
  constexpr uint64_t kPool = 256 << 20;
  auto& table = const_cast<cuda::Driver&>(*must(cuda::driver()));  // this process's own copy of the driver's addresses
  hook.launch = std::exchange(table.cuLaunchKernel, launch_kernel);
  hook.get_function = std::exchange(table.cuModuleGetFunction, get_function);
  if (table.cuMemcpyBatchAsync != nullptr) hook.copy = std::exchange(table.cuMemcpyBatchAsync, copy_batch);
  hook.launches.reserve(kMostLaunches);
  Sender sender(pipe, kPool, 16);
  Gpus gpus;
  primitives(gpus);
  const auto words = must(cuda::PinnedMemory::allocate(gpus.driver, kMostLaunches * kMostBlocks * sizeof(BlockTimes)));
  hook.times = words.device();
  const auto* times = static_cast<const BlockTimes*>(words.data());

  for (const bool with_times : {false, true}) {
    ClockOffset clock;
    double cycles_a_us = 0;
    if (with_times) {
      const auto module = must(cuda::Module::load(gpus.driver));
      const auto stream = must(cuda::OwnedStream::create(gpus.driver, cuda::OwnedStream::Priority::kHighest));
      cycles_a_us = clock_rate(gpus, stream.get());
      clock = calibrate(gpus.driver, must(module.function("kvc_stamp")), stream.get());
      std::printf("{\"bench\": \"clock\", \"+-us\": %.2f}\n", static_cast<double>(clock.uncertainty) / 1e3);
      hook.timed = gpus.function("bench_copy_timed", cuda::kBulkSharedBytes);
    }
    const char* kernel = with_times ? "timed" : "as is";
    for (const size_t count : {1, 4, 16, 64, 1024}) {
      auto from = permutation(kPool / kPage, count);
      auto to = permutation(kPool / kPage, count + 1);
      from.resize(count);
      to.resize(count);
      Series series;
      for (int round = 0; round < (count < 1024 ? 203 : 23); ++round) {
        const uint32_t immediate = sender.ask(count);
        std::this_thread::sleep_for(std::chrono::microseconds(60));
        hook.launches.clear();
        std::atomic<int64_t> ended{0};
        const TransferId transfer = must(sender.engine->open_transfer(sender.peer, [&](const Event& event) {
          ended.store(event.kind == EventKind::kTransferDone ? now_ns() : -1);
        }));
        PagedWrite write{kPage, sender.region, {from, kPage, 0}, sender.target, {to, kPage, 0}, immediate};
        const int64_t begin = now_ns();
        must(sender.engine->write_pages(transfer, std::move(write)));
        const int64_t called = now_ns();
        must(sender.engine->seal(transfer));
        while (ended.load() == 0) sched_yield();
        if (ended.load() < 0) die("a transfer failed");
        const int64_t counted = sender.counted();
        std::this_thread::sleep_for(std::chrono::microseconds(100));  // the last timestamps are in flight
        if (round < 3 || hook.launches.empty()) continue;
        const auto us = [](int64_t from_ns, int64_t to_ns) { return static_cast<double>(to_ns - from_ns) / 1e3; };
        const Launch& first = hook.launches.front();
        series.add("call to count", us(begin, counted));
        series.add("call to the sender's event", us(begin, ended.load()));
        series.add("the call itself", us(begin, called));
        series.add("call to the first launch", us(begin, first.begun));
        series.add("the call of that", us(first.begun, first.returned));
        series.add("launches", static_cast<double>(hook.launches.size()));
        series.add("call to the last launch's end", us(begin, hook.launches.back().returned));
        series.add("blocks of the first launch (0: copy engines)", first.blocks);
        if (!with_times || first.blocks == 0) continue;
        // The earliest and the latest of all blocks are in the host's clock. Times within a block are in its own
        // cycles, and the slowest block counts.
        int64_t earliest = INT64_MAX;
        int64_t latest = 0;
        double listed = 0;
        double copied = 0;
        double finished = 0;
        for (size_t i = 0; i < hook.launches.size(); ++i) {
          for (uint32_t block = 0; block < hook.launches[i].blocks; ++block) {
            const BlockTimes& at = times[i * kMostBlocks + block];
            if (i == 0) earliest = std::min(earliest, static_cast<int64_t>(at.nanoseconds[kBegun]));
            latest = std::max(latest, static_cast<int64_t>(at.nanoseconds[kFinished]));
            const auto step = [&](Moment a, Moment b) {
              return static_cast<double>(at.cycles[b] - at.cycles[a]) / cycles_a_us;
            };
            listed = std::max(listed, step(kBegun, kListRead));
            copied = std::max(copied, step(kListRead, kCopied));
            finished = std::max(finished, step(kCopied, kFinished));
          }
        }
        series.add("launch called to the first block", us(first.begun, earliest - clock.offset));
        series.add("a block reads its list (slowest)", listed);
        series.add("a block copies (slowest)", copied);
        series.add("a block fences and says so (slowest)", finished);
        series.add("the first block's begin to the last's end", us(earliest, latest));
        series.add("the last block's end to the count", us(latest - clock.offset, counted));
        series.add("the last block's end to the sender's event", us(latest - clock.offset, ended.load()));
      }
      series.report(count, kernel);
    }
  }
  const Ask end;
  pipe.put(&end, sizeof(end));
}

}  // namespace kvc::gpu_bench
