// The GPU lane in one process, over the machine's CUDA driver or, without one, over its stand-in (fake_cuda). The
// conformance list has the tests between two processes.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "cuda/copier.h"
#include "cuda/driver.h"
#include "cuda/gpu_completion_word.h"
#include "cuda/gpu_memory.h"
#include "cuda/stream_signal.h"
#include "engine/transfer_engine.h"
#include "tests/cuda_test_support.h"
#include "tests/rig.h"

namespace kvc {
namespace {

using test::Cuda;
using test::GpuBuffer;
using test::must;
using test::random_bytes;

template <typename Condition>
bool eventually(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + test::kLimit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

// --- Copier

// Stands between this process and its driver. It records the way in which copies are launched, and can remove a way or
// make it fail. No transfer engine runs meanwhile.
class WatchedCopies {
 public:
  explicit WatchedCopies(const cuda::Driver& driver) : table_(const_cast<cuda::Driver&>(driver)) {
    real_ = table_;
    kernels = batches = 0;
    breaks_off = refuses = false;
    table_.cuLaunchKernel = launch;
    table_.cuStreamSynchronize = wait;
    if (real_.cuMemcpyBatchAsync != nullptr) table_.cuMemcpyBatchAsync = copy;
  }
  WatchedCopies(const WatchedCopies&) = delete;
  WatchedCopies& operator=(const WatchedCopies&) = delete;
  ~WatchedCopies() { table_ = real_; }
  // As in drivers before CUDA 12.8.
  void remove_batches() { table_.cuMemcpyBatchAsync = nullptr; }

  static inline int kernels = 0;
  static inline int batches = 0;
  static inline bool breaks_off = false;  // before the last page of a batch
  static inline bool refuses = false;     // kernel launches
  static inline int waits = 0;            // number of waits for a stream

 private:
  static int launch(cuda::Function function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                    unsigned block_z, unsigned shared, cuda::Stream stream, void** arguments, void** extra) {
    ++kernels;
    if (refuses) return cuda::kInvalidValue;
    return real_.cuLaunchKernel(function, x, y, z, block_x, block_y, block_z, shared, stream, arguments, extra);
  }
  static int copy(cuda::DevicePointer* targets, cuda::DevicePointer* sources, size_t* lengths, size_t count,
                  cuda::CopyAttributes* attributes, size_t* first, size_t attribute_count, size_t* failed,
                  cuda::Stream stream) {
    ++batches;
    const int result = real_.cuMemcpyBatchAsync(targets, sources, lengths, count - (breaks_off ? 1 : 0), attributes,
                                                first, attribute_count, failed, stream);
    return breaks_off ? cuda::kInvalidValue : result;
  }
  static int wait(cuda::Stream stream) {
    ++waits;
    return real_.cuStreamSynchronize(stream);
  }
  static inline cuda::Driver real_{};
  cuda::Driver& table_;
};

class CopierWays : public Cuda {
 protected:
  static constexpr uint64_t kPage = 4096;
  static constexpr uint32_t kMany = cuda::kEnginePages + 1;
  void SetUp() override {
    Cuda::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (driver_->cuMemcpyBatchAsync == nullptr)
      GTEST_SKIP() << "needs a driver of CUDA 12.8 or newer, which has cuMemcpyBatchAsync";
    source_.emplace(first_, size_t{4} * kMany * kPage);
    target_.emplace(first_, source_->bytes);
    bytes_ = random_bytes(source_->bytes, 1);
    source_->put(bytes_);
  }
  // Launches the next `pages` pages.
  Status launch(cuda::Copier& copier, uint32_t pages) {
    copier.begin(kPage);
    for (uint32_t i = 0; i < pages; ++i, at_ += kPage) copier.add(source_->address + at_, target_->address + at_);
    return copier.launch();
  }
  // True if exactly the pages launched so far have arrived.
  bool all_there() const {
    std::vector<std::byte> expected(bytes_.begin(), bytes_.begin() + static_cast<int64_t>(at_));
    expected.resize(bytes_.size());
    return test::same(target_->get(), expected);
  }

  std::optional<GpuBuffer> source_;
  std::optional<GpuBuffer> target_;
  std::vector<std::byte> bytes_;
  size_t at_ = 0;
};

TEST_F(CopierWays, FewPagesGoByTheCopyEnginesAndMoreByTheKernel) {
  const WatchedCopies watched(*driver_);
  const auto copier = must(cuda::Copier::open(first_, 2));
  must(launch(*copier, 1));
  must(launch(*copier, cuda::kEnginePages));
  EXPECT_EQ(watched.batches, 2);
  EXPECT_EQ(watched.kernels, 0);
  must(launch(*copier, kMany));
  EXPECT_EQ(watched.batches, 2);
  EXPECT_EQ(watched.kernels, 1);
  copier->wait();
  EXPECT_EQ(copier->finished(), 3U);
  EXPECT_TRUE(all_there());
}

TEST_F(CopierWays, AllGoByTheKernelWhereTheDriverCopiesNoBatches) {
  WatchedCopies watched(*driver_);
  watched.remove_batches();
  const auto copier = must(cuda::Copier::open(first_, 2));
  must(launch(*copier, 1));
  must(launch(*copier, kMany));
  EXPECT_EQ(watched.kernels, 2);
  copier->wait();
  EXPECT_EQ(copier->finished(), 2U);
  EXPECT_TRUE(all_there());
}

TEST_F(CopierWays, TheEnginesWaitForNoKernelAndAreReportedBehindIt) {
  const auto copier = must(cuda::Copier::open(first_, 2));
  auto held = std::make_unique<test::HeldCopies>(test::HeldCopies::kByKernels);
  must(launch(*copier, kMany));
  const size_t behind = at_;
  must(launch(*copier, 1));
  EXPECT_TRUE(eventually([&] {
    const std::vector<std::byte> there = target_->get();
    return std::equal(there.begin() + static_cast<int64_t>(behind), there.begin() + static_cast<int64_t>(at_),
                      bytes_.begin() + static_cast<int64_t>(behind));
  }));
  if (test::HeldCopies::possible()) {
    EXPECT_EQ(copier->finished(), 0U);
  }
  must(launch(*copier, 1));  // on the kernel's stream
  held.reset();
  EXPECT_TRUE(eventually([&] { return copier->finished() == 3; }));
  EXPECT_TRUE(all_there());
  held = std::make_unique<test::HeldCopies>();
  must(launch(*copier, 1));
  if (test::HeldCopies::possible()) {
    EXPECT_EQ(copier->finished(), 3U) << "its copy has not begun";
  }
  held.reset();
  EXPECT_TRUE(eventually([&] { return copier->finished() == 4; }));
  EXPECT_TRUE(all_there());
}

TEST_F(CopierWays, WhatTheDriverRefusesGoesByTheKernelAndSoDoesAllFromThenOn) {
  WatchedCopies watched(*driver_);
  watched.breaks_off = true;
  const auto copier = must(cuda::Copier::open(first_, 2));
  must(launch(*copier, 3));
  EXPECT_EQ(copier->launched(), 1U);
  must(launch(*copier, 1));
  EXPECT_EQ(watched.batches, 1);
  EXPECT_EQ(watched.kernels, 2);
  copier->wait();
  EXPECT_EQ(copier->finished(), 2U);
  EXPECT_TRUE(all_there());
  must(copier->health());
}

TEST_F(CopierWays, ARefusedCopyHasEndedWhenItsRefusalIsReported) {
  WatchedCopies watched(*driver_);
  const auto copier = must(cuda::Copier::open(first_, 2));
  watched.breaks_off = true;
  watched.refuses = true;
  const int before = watched.waits;
  EXPECT_FALSE(launch(*copier, 3).ok());
  EXPECT_EQ(copier->launched(), 0U);
  EXPECT_EQ(watched.waits, before + 1) << "two of the three pages are under way";
}

TEST_F(Cuda, CopiesScatteredPagesOfAnyLengthAndAlignment) {
  if (first_ != second_ && first_->device() != second_->device()) {
    const cuda::Context::Scope scope(*first_);
    const int result = driver_->cuCtxEnablePeerAccess(second_->handle(), 0);
    ASSERT_TRUE(result == cuda::kSuccess || result == cuda::kPeerAccessAlreadyEnabled) << result;
  }
  constexpr size_t kBytes = 8 << 20;
  const GpuBuffer source(first_, kBytes);
  const GpuBuffer target(second_, kBytes);
  const auto either = must(cuda::Copier::open(first_, 5));
  std::unique_ptr<cuda::Copier> by_kernel;
  {
    WatchedCopies watched(*driver_);
    watched.remove_batches();
    by_kernel = must(cuda::Copier::open(first_, 5));
  }
  struct Shape {
    uint64_t page;
    uint64_t stride;
    uint64_t shift;
    uint32_t pages;
  };
  uint64_t seed = 0;
  for (const Shape& shape :
       {Shape{1, 3, 1, 300}, Shape{16, 16, 0, 4096}, Shape{100, 112, 0, 700}, Shape{4096, 8192, 16, 900},
        Shape{16384, 16384, 0, 400}, Shape{16384, 16388, 4, 300}, Shape{16400, 20480, 0, 60},
        Shape{65536, 65536, 0, 100}, Shape{1500000, 1500000, 0, 5}, Shape{4 << 20, 4 << 20, 0, 1},
        Shape{1, 3, 1, cuda::kEnginePages}, Shape{16384, 16388, 4, 9}}) {
    const std::vector<std::byte> bytes = random_bytes(kBytes, ++seed);
    source.put(bytes);
    const auto from = test::shuffled(shape.pages, (kBytes - shape.shift - shape.page) / shape.stride + 1, ++seed);
    const auto to = test::shuffled(shape.pages, (kBytes - shape.shift - shape.page) / shape.stride + 1, ++seed);
    for (cuda::Copier* const copier : {either.get(), by_kernel.get()}) {
      std::vector<std::byte> expected = random_bytes(kBytes, ++seed);
      target.put(expected);
      copier->begin(shape.page);
      for (uint32_t i = 0; i < shape.pages; ++i) {
        const uint64_t read = shape.shift + static_cast<uint64_t>(from[i]) * shape.stride;
        const uint64_t written = shape.shift + static_cast<uint64_t>(to[i]) * shape.stride;
        ASSERT_TRUE(copier->has_room(1));
        copier->add(source.address + read, target.address + written);
        std::memcpy(expected.data() + written, bytes.data() + read, shape.page);
      }
      must(copier->launch());
      copier->wait();
      EXPECT_TRUE(copier->idle());
      EXPECT_TRUE(test::same(target.get(), expected)) << shape.pages << " pages of " << shape.page << " bytes";
    }
  }
}

TEST_F(Cuda, LaunchesEndInOrderAndTheirListsAreReusedOnlyThen) {
  constexpr size_t kPage = 4096;
  constexpr size_t kRounds = 6 * cuda::kLaunches;
  constexpr size_t kMost = cuda::kEnginePages + 1;
  const GpuBuffer source(first_, kRounds * kMost * kPage);
  const GpuBuffer target(first_, source.bytes);
  const std::vector<std::byte> bytes = random_bytes(source.bytes, 1);
  source.put(bytes);
  const auto copier = must(cuda::Copier::open(first_, 2));
  size_t at = 0;
  for (size_t i = 0; i < kRounds; ++i) {
    ASSERT_TRUE(eventually([&] { return copier->finished() <= copier->launched() && copier->can_begin(); }));
    copier->begin(kPage);
    // Both ways of copying, on each stream.
    const size_t end = i % 3 == 0 ? at + kPage : at + kMost * kPage;
    for (; at < end; at += kPage) copier->add(source.address + at, target.address + at);
    must(copier->launch());
    EXPECT_EQ(copier->launched(), i + 1);
  }
  copier->wait();
  EXPECT_EQ(copier->finished(), kRounds);
  const std::vector<std::byte> there = target.get();
  EXPECT_TRUE(std::equal(there.begin(), there.begin() + static_cast<int64_t>(at), bytes.begin()));
  copier->begin(kPage);
  must(copier->launch());
  EXPECT_EQ(copier->launched(), kRounds) << "an empty launch takes no number";
}

// --- StreamSignal

TEST_F(Cuda, AStreamWritesTheSignalInItsOrder) {
  const cuda::Context::Scope scope(*first_);
  const auto stream = must(cuda::OwnedStream::create(*driver_, cuda::OwnedStream::Priority::kHighest));
  const auto signal = must(cuda::StreamSignal::create([] {}));
  EXPECT_TRUE(signal->polled());
  EXPECT_EQ(signal->load(), 0U);
  must(signal->store_on_stream(stream.get(), 5));
  must(signal->advance_on_stream(stream.get()));
  must(signal->advance_on_stream(stream.get()));
  EXPECT_TRUE(eventually([&] { return signal->load() == 7; }));
  must(signal->store_on_stream(stream.get(), 40));
  EXPECT_EQ(driver_->cuStreamSynchronize(stream.get()), cuda::kSuccess);
  EXPECT_EQ(signal->load(), 40U);
}

TEST_F(Cuda, ASignalNeedsACurrentContext) {
  std::thread([] {
    const auto signal = cuda::StreamSignal::create([] {});
    ASSERT_FALSE(signal.ok());
    EXPECT_EQ(signal.error().code, ErrorCode::kRefused);
    EXPECT_NE(signal.error().message.find("no CUDA context"), std::string::npos);
  }).join();
}

TEST_F(Cuda, AGraphThatAdvancesTheSignalAdvancesItWithEachReplay) {
  const cuda::Context::Scope scope(*first_);
  const auto stream = must(cuda::OwnedStream::create(*driver_, cuda::OwnedStream::Priority::kHighest));
  void* graph = nullptr;
  void* executable = nullptr;
  std::shared_ptr<cuda::StreamSignal> signal;
  std::thread([&] {  // in global mode, like PyTorch: the signal is created during a capture
    driver_->cuCtxPushCurrent_v2(first_->handle());
    ASSERT_EQ(test::driver_function<int(cuda::Stream, int)>("cuStreamBeginCapture_v2")(stream.get(), 0),
              cuda::kSuccess);
    auto created = cuda::StreamSignal::create([] {});
    ASSERT_TRUE(created.ok()) << created.error().to_string();
    signal = std::move(created.value());
    for (int layer = 0; layer < 3; ++layer) must(signal->advance_on_stream(stream.get()));
    ASSERT_EQ(test::driver_function<int(cuda::Stream, void**)>("cuStreamEndCapture")(stream.get(), &graph),
              cuda::kSuccess);
  })
      .join();
  ASSERT_EQ(test::driver_function<int(void**, void*, unsigned long long)>("cuGraphInstantiateWithFlags")(&executable,
                                                                                                         graph, 0),
            cuda::kSuccess);
  EXPECT_EQ(signal->load(), 0U);
  auto* const launch = test::driver_function<int(void*, cuda::Stream)>("cuGraphLaunch");
  for (int step = 0; step < 2; ++step) EXPECT_EQ(launch(executable, stream.get()), cuda::kSuccess);
  EXPECT_EQ(driver_->cuStreamSynchronize(stream.get()), cuda::kSuccess);
  EXPECT_EQ(signal->load(), 6U);
  test::driver_function<int(void*)>("cuGraphExecDestroy")(executable);
  test::driver_function<int(void*)>("cuGraphDestroy")(graph);
}

// --- CompletionWord, RemoteWrites

class CudaWord : public Cuda, public testing::WithParamInterface<cuda::GpuCompletionWord::Place> {
 protected:
  void TearDown() override { orders(100, 1); }
  // Sets what the GPU reports about remote writes. Returns false with a real driver, which reports its own values.
  static bool orders(int ordering, int options) {
    auto* const set = test::driver_function<int(int, int)>("fakeRemoteWrites");
    if (set != nullptr) set(ordering, options);
    return set != nullptr;
  }
  // The value that a kernel would read.
  uint64_t seen(const cuda::GpuCompletionWord& word) const {
    uint64_t value = 0;
    const cuda::Context::Scope scope(*first_);
    EXPECT_EQ(driver_->cuMemcpyDtoH_v2(&value, word.device(), sizeof(value)), cuda::kSuccess);
    return value;
  }
};

INSTANTIATE_TEST_SUITE_P(Places, CudaWord,
                         testing::Values(cuda::GpuCompletionWord::Place::kHost, cuda::GpuCompletionWord::Place::kGpu),
                         [](const auto& place) {
                           return place.param == cuda::GpuCompletionWord::Place::kHost ? "Host" : "Gpu";
                         });

TEST_P(CudaWord, IsSeenByTheGpuAndByTheHostWhereThatCan) {
  const auto word = must(cuda::GpuCompletionWord::create(0, GetParam(), false));
  EXPECT_EQ(seen(*word), 0U);
  must(word->store(7));
  EXPECT_TRUE(eventually([&] { return seen(*word) == 7; }));
  must(word->store(3));  // smaller values work too
  EXPECT_TRUE(eventually([&] { return seen(*word) == 3; }));
  ASSERT_EQ(word->host() != nullptr, GetParam() == cuda::GpuCompletionWord::Place::kHost);
  if (word->host() != nullptr) {
    EXPECT_EQ(word->host()->load(), 3U);
  }
}

TEST_P(CudaWord, IsStoredWhileAGraphIsCaptured) {
  test::Capturing capture(first_);
  {
    const auto word = must(cuda::GpuCompletionWord::create(0, GetParam(), true));
    for (uint64_t value = 1; value < 100; ++value) must(word->store(value));
  }
  EXPECT_EQ(capture.end(), cuda::kSuccess);
}

TEST_P(CudaWord, FlushesWhatNicsHaveWrittenWhereTheGpuDoesNotOrderIt) {
  if (!orders(0, 1)) GTEST_SKIP() << "needs the stand-in CUDA driver, because the order of a real driver cannot be set";
  auto* const flushes = test::driver_function<int()>("fakeFlushes");
  const int before = flushes();
  const auto word = must(cuda::GpuCompletionWord::create(0, GetParam(), true));
  for (uint64_t value = 1; value <= 3; ++value) must(word->store(value));
  EXPECT_EQ(flushes(), before + 3);
  const auto plain = must(cuda::GpuCompletionWord::create(0, GetParam(), false));
  must(plain->store(1));
  orders(100, 1);
  const auto ordered = must(cuda::GpuCompletionWord::create(0, GetParam(), true));
  must(ordered->store(1));
  EXPECT_EQ(flushes(), before + 3);
  orders(0, 0);
  const auto impossible = cuda::GpuCompletionWord::create(0, GetParam(), true);
  ASSERT_FALSE(impossible.ok());
  EXPECT_EQ(impossible.error().code, ErrorCode::kRefused);
}

// --- Memory that other devices read

TEST_F(Cuda, MemoryThatOthersReadIsMadeSynchronous) {
  const GpuBuffer memory(first_, 1 << 20);
  EXPECT_FALSE(memory.is_synchronous());
  must(cuda::make_synchronous(memory.data() + 4096));
  EXPECT_TRUE(memory.is_synchronous());
  std::vector<std::byte> host(4096);
  must(cuda::make_synchronous(host.data()));  // does nothing for host memory
  test::Capturing capture(first_);
  must(cuda::make_synchronous(memory.data()));
  EXPECT_EQ(capture.end(), cuda::kSuccess);
}

// Runs a test in a process in which `this` one has loaded nothing.
int run_alone(const char* test) {
  const pid_t child = fork();
  if (child == 0) test::become_test(test);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(CudaLoader, DISABLED_LooksForNoDriverThatIsNotLoaded) {
  std::vector<std::byte> memory(4096);
  EXPECT_FALSE(cuda::is_gpu_memory(memory.data()));
  must(cuda::refuse_gpu_memory("tcp", memory.data()));
  must(cuda::make_synchronous(memory.data()));
  EXPECT_FALSE(cuda::export_dma_buf(memory.data(), memory.size()).ok());
  EXPECT_EQ(cuda::loaded_driver(), nullptr);
  EXPECT_EQ(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), nullptr);
  // Once the driver is loaded, whoever loaded it.
  const cuda::Driver* const driver = test::find_driver();
  ASSERT_NE(driver, nullptr);
  EXPECT_EQ(cuda::loaded_driver(), driver) << "there is one table";
  const GpuBuffer gpu(must(cuda::Context::retain(0)), 4096);
  EXPECT_TRUE(cuda::is_gpu_memory(gpu.data()));
  const Status refused = cuda::refuse_gpu_memory("tcp", gpu.data());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kNotReachable);
}
TEST(CudaLoader, LooksForNoDriverThatIsNotLoaded) {
  EXPECT_EQ(run_alone("CudaLoader.DISABLED_LooksForNoDriverThatIsNotLoaded"), 0);
}

// --- The provider

// A transfer engine with one region of GPU memory.
struct GpuSide {
  GpuBuffer memory;
  std::unique_ptr<TransferEngine> engine;
  RegionId region = 0;
  GpuSide(const std::shared_ptr<cuda::Context>& gpu, const std::string& name, size_t bytes)
      : memory(gpu, bytes),
        engine(must(TransferEngine::create(test::config(name, "nvlink")), "create")),
        region(must(engine->register_memory(memory.data(), bytes), "register_memory")) {}
};

TEST_F(Cuda, LayersAreWrittenWhenTheStreamHasComeToThem) {
  constexpr size_t kPage = 65536;
  constexpr size_t kPages = 24;
  constexpr size_t kLayers = 4;
  GpuSide sender(first_, "sender", kLayers * kPages * kPage);
  GpuSide receiver(second_, "receiver", kLayers * kPages * kPage);
  const test::Connection connection = test::connect(*sender.engine, *receiver.engine);
  const RemoteRegionId target = must(sender.engine->import_region(
      connection.first_to_second, must(receiver.engine->region_descriptor(receiver.region))));
  const std::vector<std::byte> computed = random_bytes(sender.memory.bytes, 9);
  const GpuBuffer results(first_, sender.memory.bytes);
  results.put(computed);

  const cuda::Context::Scope scope(*first_);
  const auto stream = must(cuda::OwnedStream::create(*driver_, cuda::OwnedStream::Priority::kHighest));
  const auto signal = must(sender.engine->create_stream_signal());
  const CounterSet counters = must(receiver.engine->alloc_counters(kLayers));
  must(receiver.engine->expect(counters.id, std::vector<uint64_t>(kLayers, kPages)));
  const TransferId transfer = must(sender.engine->open_transfer(connection.first_to_second));
  std::vector<int64_t> order = test::shuffled(kPages, kPages, 3);
  std::vector<ArmedLayer> layers;
  for (size_t layer = 0; layer < kLayers; ++layer) {
    layers.push_back({layer + 1, layer * kPages * kPage, layer * kPages * kPage, counters.immediates[layer]});
  }
  must(sender.engine->arm(transfer, signal,
                          PagedWrite{kPage, sender.region, {order, kPage, 0}, target, {order, kPage, 0}, {}}, layers));
  must(sender.engine->seal(transfer));
  // The "forward pass": each layer's pages are written, then the stream signals it. Nothing here waits for the stream.
  for (size_t layer = 0; layer < kLayers; ++layer) {
    const uint64_t offset = layer * kPages * kPage;
    driver_->cuMemcpyDtoDAsync_v2(sender.memory.address + offset, results.address + offset, kPages * kPage,
                                  stream.get());
    must(signal->store_on_stream(stream.get(), layer + 1));
  }
  must(receiver.engine->wait_counters(counters.id, test::kLimit));
  EXPECT_TRUE(receiver.memory.get() == computed);
  EXPECT_EQ(test::ended(*sender.engine, transfer).kind, EventKind::kTransferDone);
}

TEST_F(Cuda, AnEngineWhoseGpuHangsClosesAndItsPeersFenceItWhenTheCopiesEnd) {
  if (!test::HeldCopies::possible())
    GTEST_SKIP() << "needs the stand-in CUDA driver, because a real driver cannot hold copies back";
  constexpr size_t kPage = 4096;
  std::optional<GpuSide> sender(std::in_place, first_, "sender", kPage);
  GpuSide receiver(second_, "receiver", kPage);
  const test::Connection connection = test::connect(*sender->engine, *receiver.engine);
  const RemoteRegionId target = must(sender->engine->import_region(
      connection.first_to_second, must(receiver.engine->region_descriptor(receiver.region))));
  {
    const test::HeldCopies held;
    must(sender->engine->write_one(connection.first_to_second, sender->region, 0, target, 0, kPage, std::nullopt));
    test::await([&] { return held.count() == 1; }, "the copy");
    const Status closed = sender->engine->close();
    EXPECT_EQ(held.count(), 1) << "it has not waited for the copy";
    ASSERT_FALSE(closed.ok());
    EXPECT_EQ(closed.error().code, ErrorCode::kTimeout);
    EXPECT_NE(closed.error().message.find("GPU " + std::to_string(first_->device())), std::string::npos)
        << closed.error().message;
    must(sender->engine->close());  // the error is reported once
    const Status fenced = receiver.engine->fence(connection.second_to_first, std::chrono::milliseconds(50));
    EXPECT_FALSE(fenced.ok()) << "the copy may still land";
  }
  must(receiver.engine->fence(connection.second_to_first, test::kLimit));
  must(receiver.engine->deregister_memory(receiver.region, test::kLimit));
  sender.reset();
}

TEST_F(Cuda, MemoryOutsideAGpuIsRefused) {
  const auto engine = must(TransferEngine::create(test::config("engine", "nvlink")), "create");
  std::vector<std::byte> memory(4096);
  const Result<RegionId> region = engine->register_memory(memory.data(), memory.size());
  ASSERT_FALSE(region.ok());
  EXPECT_EQ(region.error().code, ErrorCode::kNotReachable);
  EXPECT_NE(region.error().message.find("GPU memory only"), std::string::npos) << region.error().message;
}

TEST_F(Cuda, MemoryBeyondItsAllocationIsRefused) {
  const auto engine = must(TransferEngine::create(test::config("engine", "nvlink")), "create");
  const GpuBuffer memory(first_, 1 << 20);
  const Result<RegionId> region = engine->register_memory(memory.data() + 4096, 64 << 20);
  ASSERT_FALSE(region.ok());
  EXPECT_EQ(region.error().code, ErrorCode::kRefused);
  EXPECT_NE(region.error().message.find("spans several allocations"), std::string::npos) << region.error().message;
}

TEST_F(Cuda, MemoryThatCannotBeSharedIsRefusedWithWhatToTurnOff) {
  const auto forbid = reinterpret_cast<int (*)(cuda::DevicePointer)>(dlsym(RTLD_DEFAULT, "fakeForbidSharing"));
  if (forbid == nullptr)
    GTEST_SKIP() << "needs the stand-in CUDA driver, because a real driver makes no memory of this kind";
  const auto engine = must(TransferEngine::create(test::config("engine", "nvlink")), "create");
  const GpuBuffer memory(first_, 1 << 20);
  forbid(memory.address);
  const Result<RegionId> region = engine->register_memory(memory.data(), memory.bytes);
  ASSERT_FALSE(region.ok());
  EXPECT_EQ(region.error().code, ErrorCode::kRefused);
  EXPECT_NE(region.error().message.find("expandable_segments"), std::string::npos) << region.error().message;
}

TEST_F(Cuda, OneEngineServesOneGpu) {
  if (first_->device() == second_->device()) GTEST_SKIP() << "needs two GPUs";
  const auto engine = must(TransferEngine::create(test::config("engine", "nvlink")), "create");
  const GpuBuffer here(first_, 4096);
  const GpuBuffer there(second_, 4096);
  must(engine->register_memory(here.data(), here.bytes));
  const Result<RegionId> region = engine->register_memory(there.data(), there.bytes);
  ASSERT_FALSE(region.ok());
  EXPECT_NE(region.error().message.find("one engine serves one GPU"), std::string::npos) << region.error().message;
}

}  // namespace
}  // namespace kvc
