// kvc_gpu_bench: measures the GPU lane on a machine with two GPUs. Prints one JSON object a line.
//
//     copies    scattered pages from GPU 0 to GPU 1 by the Copier alone: page sizes x batch sizes x SMs, against one
//               plain cuMemcpy of the same bytes
//     engine    the same through two TransferEngines in two processes, and the time until the receiver has counted
//     signal    from a stream's write to a thread that polls, and to the receiver's count of a page armed on it, with
//               the GPU busy; StreamSignal in a CUDA graph is checked by native/tests/cuda_test.cc
//     stages    the time of each stage of a small batch, from the call to the count
//     latency   small batches by the kernel and by the copy engines: their time beside other kernels, and the slowdown
//               of those kernels
//     large     large pages by the copy engines and by the kernel, by page length and launch size
//
// Every copy except those of `large` is checked byte for byte against its source, with fresh random data, once per
// combination.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/gpu/clock_offset.h"
#include "bench/gpu/large.h"
#include "bench/gpu/latency.h"
#include "bench/gpu/stages.h"
#include "bench/gpu/support.h"
#include "bench/gpu/two_processes.h"
#include "cuda/copier.h"
#include "cuda/driver.h"
#include "cuda/stream_signal.h"

namespace kvc::gpu_bench {
namespace {

// --- copies

void copies() {
  const auto sender = must(cuda::Context::retain(0));
  const auto receiver = must(cuda::Context::retain(1));
  const cuda::Driver& driver = sender->driver();
  {
    const cuda::Context::Scope scope(*sender);
    must_cuda(driver.cuCtxEnablePeerAccess(receiver->handle(), 0), "cuCtxEnablePeerAccess");
  }
  constexpr uint64_t kPool = 2ULL << 30;
  Buffer source(sender, kPool, 1);
  Buffer target(receiver, kPool, 2);
  std::vector<std::byte> expected = source.read();

  {  // the upper limit: one plain copy
    const cuda::Context::Scope scope(*sender);
    auto stream = must(cuda::OwnedStream::create(driver, cuda::OwnedStream::Priority::kHighest));
    std::vector<double> rates;
    for (int i = 0; i < 6; ++i) {
      const int64_t begin = now_ns();
      must_cuda(driver.cuMemcpyDtoDAsync_v2(target.address, source.address, kPool, stream.get()), "DtoD");
      must_cuda(driver.cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
      if (i > 0) rates.push_back(static_cast<double>(kPool) / static_cast<double>(now_ns() - begin));
    }
    std::printf("{\"bench\": \"plain copy\", \"bytes\": %llu, \"GB/s\": %.1f}\n",
                static_cast<unsigned long long>(kPool), percentile(rates, 0.5));
  }
  for (const uint32_t blocks : {4U, 8U, 16U, 24U, 32U}) {
    const auto copier = must(cuda::Copier::open(sender, blocks));
    for (const uint64_t page : {16ULL << 10, 32ULL << 10, 64ULL << 10, 128ULL << 10}) {
      for (const uint64_t batch : {1ULL << 20, 64ULL << 20, 1ULL << 30}) {
        const size_t count = batch / page;
        const auto from = permutation(kPool / page, page + batch);
        const auto to = permutation(kPool / page, page + batch + 1);
        const auto run = [&] {
          for (size_t done = 0; done < count;) {
            while (!copier->can_begin()) copier->finished();
            copier->begin(page);
            for (; done < count && copier->has_room(1); ++done) {
              copier->add(source.address + static_cast<uint64_t>(from[done]) * page,
                          target.address + static_cast<uint64_t>(to[done]) * page);
            }
            must(copier->launch());
          }
          while (!copier->idle()) sched_yield();
        };
        run();
        if (blocks == 16 && batch == 64ULL << 20) {
          source.fill(page);
          expected = source.read();
          run();
          check_pages(expected, target.read(), page, {from.begin(), from.begin() + static_cast<int64_t>(count)}, to);
        }
        std::vector<double> rates;
        const int rounds = batch == 1ULL << 30 ? 5 : 20;
        for (int i = 0; i < rounds; ++i) {
          const int64_t begin = now_ns();
          run();
          rates.push_back(static_cast<double>(batch) / static_cast<double>(now_ns() - begin));
        }
        std::printf("{\"bench\": \"copies\", \"sms\": %u, \"page\": %llu, \"batch\": %llu, \"GB/s\": %.1f}\n", blocks,
                    static_cast<unsigned long long>(page), static_cast<unsigned long long>(batch),
                    percentile(rates, 0.5));
      }
    }
  }
}

constexpr uint64_t kEnginePool = 1ULL << 30;

void send_pages(const Pipe& pipe) {
  Sender sender(pipe, kEnginePool, 16);
  for (const uint64_t page : {16ULL << 10, 64ULL << 10, 128ULL << 10}) {
    for (const uint64_t batch : std::initializer_list<uint64_t>{page, 64 * page, 64 << 20, 512 << 20}) {
      const size_t count = batch / page;
      auto from = permutation(kEnginePool / page, page + batch);
      auto to = permutation(kEnginePool / page, page + batch + 1);
      from.resize(count);
      to.resize(count);
      std::vector<double> microseconds;
      const int rounds = batch <= 64 * page ? 300 : 9;
      for (int round = 0; round < rounds; ++round) {
        const bool check = round == 0 && batch == 64ULL << 20;
        const uint32_t immediate = sender.ask(count, check ? page : 0);
        if (batch <= 64 * page) std::this_thread::sleep_for(std::chrono::microseconds(50));
        const TransferId transfer = must(sender.engine->open_transfer(sender.peer));
        PagedWrite write{page, sender.region, {from, page, 0}, sender.target, {to, page, 0}, immediate};
        const int64_t begin = now_ns();
        must(sender.engine->write_pages(transfer, std::move(write)));
        must(sender.engine->seal(transfer));
        const Event done = must(sender.engine->wait_transfer(transfer, std::chrono::seconds(20)));
        if (done.kind != EventKind::kTransferDone) die(done.error->to_string());
        const int64_t end = sender.counted();
        if (check) check_pages(sender.memory.read(), pipe.receive(), page, from, to);
        if (round > 0) microseconds.push_back(static_cast<double>(end - begin) / 1e3);
      }
      std::printf(
          "{\"bench\": \"engine\", \"page\": %llu, \"batch\": %llu, \"GB/s\": %.1f, \"us p50\": %.1f, \"us p99\": "
          "%.1f}\n",
          static_cast<unsigned long long>(page), static_cast<unsigned long long>(batch),
          static_cast<double>(batch) / percentile(microseconds, 0.5) / 1e3, percentile(microseconds, 0.5),
          percentile(microseconds, 0.99));
    }
  }
  const Ask end;
  pipe.put(&end, sizeof(end));
}

// --- signal

void report(const char* what, const std::vector<double>& us, double uncertainty) {
  std::printf(
      "{\"bench\": \"signal\", \"from stream to\": \"%s\", \"n\": %zu, \"us avg\": %.2f, \"p50\": %.2f, \"p99\": %.2f, "
      "\"p99.9\": %.2f, \"max\": %.2f, \"clock +-us\": %.2f}\n",
      what, us.size(), mean(us), percentile(us, 0.5), percentile(us, 0.99), percentile(us, 0.999),
      *std::max_element(us.begin(), us.end()), uncertainty);
}

void signals(const Pipe& pipe) {
  Sender sender(pipe, 64 << 20, 16);
  const cuda::Driver& driver = sender.gpu->driver();
  const cuda::Context::Scope scope(*sender.gpu);
  const auto module = must(cuda::Module::load(driver));
  const auto stamp = must(module.function("kvc_stamp"));
  const auto stream = must(cuda::OwnedStream::create(driver, cuda::OwnedStream::Priority::kHighest));
  const ClockOffset clock = calibrate(driver, stamp, stream.get());
  const auto signal = must(sender.engine->create_stream_signal());
  auto words = must(cuda::PinnedMemory::allocate(driver, 128));
  auto* stamped = static_cast<std::atomic<uint64_t>*>(words.data()) + 8;
  static_cast<std::atomic<uint64_t>*>(words.data())->store(UINT64_MAX);

  // Keeps the GPU's memory and copy paths busy beside the measured stream, which itself copies before each write.
  Buffer load(sender.gpu, 1ULL << 30, 3);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    const cuda::Context::Scope mine(*sender.gpu);
    const auto other = must(cuda::OwnedStream::create(driver, cuda::OwnedStream::Priority::kLowest));
    while (!stop.load()) {
      for (int i = 0; i < 8; ++i) {
        driver.cuMemcpyDtoDAsync_v2(load.address, load.address + (512 << 20), 256 << 20, other.get());
      }
      driver.cuStreamSynchronize(other.get());
    }
  });
  const auto enqueue = [&](uint64_t value) {
    stamped->store(0);
    driver.cuMemcpyDtoDAsync_v2(sender.memory.address, sender.memory.address + (32 << 20), 8 << 20, stream.get());
    cuda::DevicePointer out_address = words.device() + 64;
    cuda::DevicePointer gate_address = words.device();
    uint64_t open = 0;
    void* arguments[] = {&out_address, &gate_address, &open};
    driver.cuLaunchKernel(stamp, 1, 1, 1, 1, 1, 1, 0, stream.get(), static_cast<void**>(arguments), nullptr);
    must(signal->store_on_stream(stream.get(), value));
  };
  const auto finished_layer = [&] {
    while (stamped->load() == 0) {
    }
    return static_cast<int64_t>(stamped->load()) - clock.offset;
  };

  constexpr int kRounds = 20000;
  uint64_t value = 0;
  std::vector<double> polled;
  for (int i = 0; i < kRounds; ++i) {
    enqueue(++value);
    while (signal->load() < value) sched_yield();  // as the transfer thread does
    const int64_t seen = now_ns();
    polled.push_back(static_cast<double>(seen - finished_layer()) / 1e3);
  }
  report("a polling thread", polled, static_cast<double>(clock.uncertainty) / 1e3);

  std::vector<double> counted;
  for (int i = 0; i < 2000; ++i) {
    const uint32_t immediate = sender.ask(1);
    const TransferId transfer = must(sender.engine->open_transfer(sender.peer));
    ++value;
    must(sender.engine->arm(transfer, signal,
                            PagedWrite{65536, sender.region, {{0}, 65536, 0}, sender.target, {{0}, 65536, 0}, {}},
                            {ArmedLayer{value, 0, 0, immediate}}));
    must(sender.engine->seal(transfer));
    std::this_thread::sleep_for(std::chrono::microseconds(30));
    enqueue(value);
    must(sender.engine->wait_transfer(transfer, std::chrono::seconds(20)));
    const int64_t when = sender.counted();
    counted.push_back(static_cast<double>(when - finished_layer()) / 1e3);
  }
  report("the receiver's count of a 64 KiB page", counted, static_cast<double>(clock.uncertainty) / 1e3);
  stop = true;
  busy.join();
  const Ask end;
  pipe.put(&end, sizeof(end));
}

}  // namespace
}  // namespace kvc::gpu_bench

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string what = count > 1 ? arguments[1] : "";
  using namespace kvc::gpu_bench;
  if (what == "copies") {
    copies();
    return 0;
  }
  if (what == "engine")
    return two_processes([](const Pipe& pipe) { return receive_pages(pipe, kEnginePool); }, send_pages);
  if (what == "signal") return two_processes([](const Pipe& pipe) { return receive_pages(pipe, 64 << 20); }, signals);
  if (what == "stages") return two_processes([](const Pipe& pipe) { return receive_pages(pipe, 256 << 20); }, stages);
  if (what == "latency") {
    latency();
    return 0;
  }
  if (what == "large") {
    large();
    return 0;
  }
  std::fprintf(stderr, "usage: kvc_gpu_bench copies | engine | signal | stages | latency | large\n");
  return 2;
}
