// kvc_gpu_bench: what the GPU lane does on a machine with two GPUs. Prints one JSON object a line.
//
//   copies    scattered pages from GPU 0 to GPU 1 by the Copier alone: page sizes x batch sizes x SMs, against one
//             plain cuMemcpy of the same bytes
//   engine    the same through two TransferEngines in two processes, and the time until the receiver has counted
//   signal    from a stream's write to a thread that polls, and to the receiver's count of a page armed on it, with the
//             GPU busy; StreamSignal in a CUDA graph is checked by native/tests/cuda_test.cc
//
// Every copy is checked byte for byte against its source, with fresh random data, once per combination.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/copier.h"
#include "cuda/driver.h"
#include "cuda/stream_signal.h"
#include "engine/transfer_engine.h"

namespace kvc {
namespace {

using Clock = std::chrono::steady_clock;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "kvc_gpu_bench: %s\n", what.c_str());
  std::exit(1);
}
template <typename T>
T must(Result<T> result) {
  if (!result) die(result.error().to_string());
  return std::move(result.value());
}
void must(Status status) {
  if (!status) die(status.error().to_string());
}
void must_cuda(int result, const char* call) {
  if (result != cuda::kSuccess) die(cuda::cuda_error("bench", call, result).to_string());
}

double percentile(std::vector<double> values, double p) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(p * static_cast<double>(values.size())))];
}
double mean(const std::vector<double>& values) {
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

std::vector<int64_t> permutation(size_t count, uint64_t seed) {
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  return order;
}

void check_pages(const std::vector<std::byte>& source, const std::vector<std::byte>& target, uint64_t page,
                 const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  for (size_t i = 0; i < from.size(); ++i) {
    if (std::memcmp(source.data() + static_cast<uint64_t>(from[i]) * page,
                    target.data() + static_cast<uint64_t>(to[i]) * page, page) != 0) {
      die("page " + std::to_string(i) + " of " + std::to_string(page) + " bytes differs");
    }
  }
}

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

  {  // the ceiling: one plain copy
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

// --- Two processes

// Bytes between the two, each with its length.
struct Pipe {
  int in = -1;
  int out = -1;
  void put(const void* data, size_t bytes) const {
    for (size_t at = 0; at < bytes;) {
      const ssize_t n = write(out, static_cast<const char*>(data) + at, bytes - at);
      if (n <= 0) die("the other process is gone");
      at += static_cast<size_t>(n);
    }
  }
  void get(void* data, size_t bytes) const {
    for (size_t at = 0; at < bytes;) {
      const ssize_t n = read(in, static_cast<char*>(data) + at, bytes - at);
      if (n <= 0) die("the other process is gone");
      at += static_cast<size_t>(n);
    }
  }
  void send(const Bytes& bytes) const {
    const uint64_t size = bytes.size();
    put(&size, sizeof(size));
    put(bytes.data(), bytes.size());
  }
  Bytes receive() const {
    uint64_t size = 0;
    get(&size, sizeof(size));
    Bytes bytes(size);
    get(bytes.data(), size);
    return bytes;
  }
};

EngineConfig config(const char* name, uint32_t blocks) {
  EngineConfig config;
  config.name = name;
  config.spin_us = 300;  // what is measured is the lane, and not how long a processor takes to wake up
  DomainConfig domain;
  domain.provider = "nvlink";
  domain.copy_blocks = blocks;
  config.domains = {domain};
  return config;
}

// What the sender asks for: counters with a target; answered with the time at which they were reached. 0: the end.
struct Ask {
  uint64_t target = 0;
  uint64_t check_page = 0;  // afterwards, send all memory back for a check
};

int receive_pages(const Pipe& pipe, uint64_t bytes) {
  const auto gpu = must(cuda::Context::retain(1));
  Buffer memory(gpu, bytes, 2);
  auto engine = must(TransferEngine::create(config("receiver", 16)));
  const RegionId region = must(engine->register_memory(memory.data(), bytes));
  const Handshake answer = must(engine->accept("sender", pipe.receive()));
  pipe.send(answer.bytes);
  pipe.send(must(engine->region_descriptor(region)));
  for (;;) {
    Ask ask;
    pipe.get(&ask, sizeof(ask));
    if (ask.target == 0) return 0;
    CounterSet set = must(engine->alloc_counters(1));
    std::atomic<int64_t> counted{0};
    must(engine->expect(set.id, {ask.target}, [&](const Event&) { counted.store(now_ns()); }));
    pipe.put(&set.immediates[0], sizeof(uint32_t));
    while (counted.load() == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
    const int64_t when = counted.load();
    pipe.put(&when, sizeof(when));
    if (ask.check_page != 0) pipe.send(memory.read());
    must(engine->release_counters(set.id));
  }
}

struct Sender {
  Sender(const Pipe& to, uint64_t size, uint32_t blocks)
      : pipe(to), gpu(must(cuda::Context::retain(0))), memory(gpu, size, 1) {
    engine = must(TransferEngine::create(config("sender", blocks)));
    region = must(engine->register_memory(memory.data(), size));
    const Handshake offer = must(engine->offer("receiver"));
    pipe.send(offer.bytes);
    must(engine->complete(offer.peer, pipe.receive()));
    peer = offer.peer;
    target = must(engine->import_region(peer, pipe.receive()));
  }
  uint32_t ask(uint64_t count, uint64_t check_page = 0) const {
    const Ask ask{count, check_page};
    pipe.put(&ask, sizeof(ask));
    uint32_t immediate = 0;
    pipe.get(&immediate, sizeof(immediate));
    return immediate;
  }
  int64_t counted() const {
    int64_t when = 0;
    pipe.get(&when, sizeof(when));
    return when;
  }
  const Pipe& pipe;
  const std::shared_ptr<cuda::Context> gpu;
  Buffer memory;
  std::unique_ptr<TransferEngine> engine;
  RegionId region = 0;
  PeerId peer = 0;
  RemoteRegionId target = 0;
};

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

// The GPU's clock minus ours, in ns, and how far off that may be.
struct ClockOffset {
  int64_t offset = 0;
  int64_t uncertainty = 0;
};
ClockOffset calibrate(const cuda::Driver& driver, cuda::Function stamp, cuda::Stream stream) {
  auto words = must(cuda::PinnedMemory::allocate(driver, 128));
  auto* gate = static_cast<std::atomic<uint64_t>*>(words.data());
  auto* out = gate + 8;
  int64_t low = INT64_MIN;
  int64_t high = INT64_MAX;
  gate->store(0);
  for (uint64_t round = 1; round <= 2000; ++round) {
    out->store(0);
    cuda::DevicePointer out_address = words.device() + 64;
    cuda::DevicePointer gate_address = words.device();
    void* arguments[] = {&out_address, &gate_address, &round};
    must_cuda(driver.cuLaunchKernel(stamp, 1, 1, 1, 1, 1, 1, 0, stream, static_cast<void**>(arguments), nullptr),
              "cuLaunchKernel");
    const int64_t ready = now_ns();
    while (now_ns() - ready < 15000) {
    }
    const int64_t before = now_ns();
    gate->store(round);
    while (out->load() == 0) {
    }
    const int64_t after = now_ns();
    const auto gpu = static_cast<int64_t>(out->load());
    low = std::max(low, gpu - after);
    high = std::min(high, gpu - before);
  }
  return {(low + high) / 2, (high - low) / 2};
}

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
    while (signal->load() < value) sched_yield();  // what the worker does
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

// Runs `receiver` in a child process, which must not inherit a CUDA context: so before anything else.
int two_processes(const std::function<int(const Pipe&)>& receiver, const std::function<void(const Pipe&)>& sender) {
  int there[2];
  int back[2];
  if (pipe(there) != 0 || pipe(back) != 0) die("pipe");
  const pid_t child = fork();
  if (child == 0) {
    close(there[1]);
    close(back[0]);
    _exit(receiver(Pipe{there[0], back[1]}));
  }
  close(there[0]);
  close(back[1]);
  sender(Pipe{back[0], there[1]});
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

}  // namespace
}  // namespace kvc

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string what = count > 1 ? arguments[1] : "";
  using namespace kvc;
  if (what == "copies") {
    copies();
    return 0;
  }
  if (what == "engine")
    return two_processes([](const Pipe& pipe) { return receive_pages(pipe, kEnginePool); }, send_pages);
  if (what == "signal") return two_processes([](const Pipe& pipe) { return receive_pages(pipe, 64 << 20); }, signals);
  std::fprintf(stderr, "usage: kvc_gpu_bench copies | engine | signal\n");
  return 2;
}
