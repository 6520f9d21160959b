// Expert groups of one process, used by several threads: which calls are allowed meanwhile, and how a group in use
// ends.
#include <future>

#include "tests/moe_test_support.h"

namespace kvc::moe {
namespace {

constexpr uint64_t kLong = 20'000'000'000;

class MoeThreads : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (!GetParam()) return;
    driver_ = test::find_driver();
    ASSERT_NE(driver_, nullptr);
    if (cuda::kernel_image().empty()) GTEST_SKIP() << "needs GPU kernels: this build had no nvcc";
    context_ = must(cuda::Context::retain(0));
    const cuda::Context::Scope scope(*context_);
    for (cuda::OwnedStream& stream : streams_) {
      stream = must(cuda::OwnedStream::create(*driver_, cuda::OwnedStream::Priority::kHighest));
    }
  }

  // Creates two ranks of one group.
  void form(uint64_t timeout_ns = kLong) {
    for (uint32_t rank : {0U, 1U}) {
      GroupConfig config;
      config.rank = rank;
      config.ranks = 2;
      config.device = context_ ? 0 : -1;
      config.dispatch_bytes = config.combine_bytes = 4096;
      config.max_tokens = 4;
      config.experts = 2;
      config.slots = 2;
      config.timeout_ns = timeout_ns;
      groups_[rank] = must(Group::create(config));
    }
    for (uint32_t rank : {0U, 1U}) must(groups_[rank]->attach(1 - rank, must(groups_[1 - rank]->descriptor()).get()));
  }
  // The stream of a rank's slot.
  cuda::Stream stream(uint32_t rank, uint32_t slot = 0) const { return streams_[rank * 2 + slot].get(); }
  void finish(uint32_t rank, uint32_t slot) const {
    if (!context_) return;
    const cuda::Context::Scope scope(*context_);
    driver_->cuStreamSynchronize(stream(rank, slot));
  }
  Status dispatch(uint32_t rank, uint32_t slot, const Place& rows) {
    const ColumnSpec column{rows.data(), 16, 0, false};
    return groups_[rank]->dispatch(stream(rank, slot), slot, sizes_, nullptr, 4, 1, {&column, 1}, kSend | kReceive);
  }
  Status combine(uint32_t rank, uint32_t slot, const Place& rows) {
    return groups_[rank]->combine(stream(rank, slot), slot, sizes_, rows.data(), 8, false, kSend | kReceive);
  }
  // Number of mapped pieces of GPU memory.
  static int pieces() {
    auto* const count = test::driver_function<int()>("fakeMappedPieces");
    return count != nullptr ? count() : 0;
  }

  const cuda::Driver* driver_ = nullptr;
  std::shared_ptr<cuda::Context> context_;
  std::array<cuda::OwnedStream, 4> streams_;
  std::array<std::unique_ptr<Group>, 2> groups_;
  std::array<uint32_t, 2> sizes_{1, 1};
};
INSTANTIATE_TEST_SUITE_P(Moe, MoeThreads, testing::Bool(),
                         [](const auto& parameter) { return parameter.param ? "Gpu" : "Host"; });

TEST_P(MoeThreads, SlotsAreUsedByThreadsOfTheirOwn) {
  form();
  std::atomic<bool> over{false};
  std::thread onlooker([&] {
    while (!over) {
      EXPECT_FALSE(groups_[0]->fault().has_value());
      EXPECT_NE(groups_[1]->base(), nullptr);
      groups_[0]->lose(99);
      std::this_thread::yield();
    }
  });
  // Not freed by the threads: freeing GPU memory waits for all launches.
  std::vector<std::unique_ptr<Place>> places;
  for (int i = 0; i < 4; ++i) places.push_back(std::make_unique<Place>(context_, 16));
  std::vector<std::thread> threads;
  for (uint32_t rank : {0U, 1U}) {
    for (uint32_t slot : {0U, 1U}) {
      threads.emplace_back([this, rank, slot, &rows = *places[rank * 2 + slot]] {
        Group& group = *groups_[rank];
        for (uint32_t step = 1; step <= 50; ++step) {
          std::array<uint16_t, 8> values{};
          values.fill(static_cast<uint16_t>(0x3f80 + step + 64 * rank));
          put(context_, rows.data(), values.data(), 16);
          must(dispatch(rank, slot, rows));
          finish(rank, slot);
          const auto area = get(context_, group.base() + group.layout().dispatch(slot), 32);
          for (uint32_t source : {0U, 1U}) {
            EXPECT_EQ(area[source * 16], 0x80 + step + 64 * source - (step + 64 * source >= 128 ? 256 : 0));
          }
          // Every expert returns 1, so the sum is the number of ranks.
          const std::vector<uint16_t> ones(16, 0x3f80);
          put(context_, group.base() + group.layout().combine(slot), ones.data(), 32);
          must(combine(rank, slot, rows));
          finish(rank, slot);
          EXPECT_EQ(get(context_, rows.data(), 2)[0], 0x00) << "2.0 is 0x4000";
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  over = true;
  onlooker.join();
}

TEST_P(MoeThreads, CloseEndsALaunchThatWaits) {
  const int before = pieces();
  form();
  const Place rows(context_, 16);
  std::promise<void> begins;
  std::thread waits([&] {
    begins.set_value();
    const Status status = dispatch(0, 0, rows);
    // Closed before it began, or ended by the close.
    EXPECT_TRUE(status.ok() || status.error().code == ErrorCode::kClosed);
  });
  begins.get_future().wait();
  if (!context_) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // usually long enough to be in the wait
  if (context_) waits.join();
  const auto start = std::chrono::steady_clock::now();
  must(groups_[0]->close(kLong));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::nanoseconds(kLong)) << "not by the group's timeout";
  if (waits.joinable()) waits.join();
  EXPECT_EQ(dispatch(0, 0, rows).error().code, ErrorCode::kClosed);
  must(groups_[1]->close(kLong));
  EXPECT_EQ(pieces(), before) << "everything is freed";
}

TEST_P(MoeThreads, AHangingGpuKeepsItsMemory) {
  if (!GetParam()) GTEST_SKIP() << "needs the GPU variant: host memory has no kernel to hold";
  if (!test::HeldCopies::possible())
    GTEST_SKIP() << "needs the stand-in CUDA driver, because a real driver cannot be held";
  const int before = pieces();
  form();
  const int formed = pieces();
  EXPECT_EQ(formed, before + 4);
  const Place rows(context_, 32);
  {
    const test::HeldCopies held;
    {
      const cuda::Context::Scope scope(*context_);
      auto target = reinterpret_cast<cuda::DevicePointer>(rows.data() + 16);
      auto source = reinterpret_cast<cuda::DevicePointer>(rows.data());
      size_t bytes = 16;
      size_t first = 0;
      size_t failed = 0;
      cuda::CopyAttributes attributes{};
      attributes.source_order = 1;
      ASSERT_EQ(driver_->cuMemcpyBatchAsync(&target, &source, &bytes, 1, &attributes, &first, 1, &failed, stream(0)),
                0);
    }
    must(dispatch(0, 0, rows));
    EXPECT_EQ(groups_[0]->close(30'000'000).error().code, ErrorCode::kTimeout);
    EXPECT_EQ(pieces(), formed) << "the launch may still come to it";
    EXPECT_EQ(dispatch(0, 0, rows).error().code, ErrorCode::kClosed);
    EXPECT_EQ(groups_[0]->descriptor().error().code, ErrorCode::kClosed);
  }
  must(groups_[0]->close(kLong));
  EXPECT_EQ(pieces(), formed - 2);
  groups_[1].reset();
  EXPECT_EQ(pieces(), before);
}

// The other slot's launches must not wait for their own timeout in turn.
TEST_P(MoeThreads, AFaultEndsTheWaitsOfBothSlots) {
  constexpr uint64_t kTimeout = 700'000'000;
  form(kTimeout);
  const Place rows(context_, 16);
  must(dispatch(0, 0, rows));
  finish(0, 0);
  ASSERT_TRUE(groups_[0]->fault().has_value());
  EXPECT_EQ(groups_[0]->fault()->first, Fault::kDispatchTimeout);
  EXPECT_EQ(groups_[0]->fault()->second, 1U);
  const auto start = std::chrono::steady_clock::now();
  must(dispatch(0, 1, rows));
  must(combine(0, 1, rows));
  finish(0, 1);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::nanoseconds(kTimeout));
}

TEST_P(MoeThreads, TheFirstFaultIsReported) {
  form(50'000'000);
  const Place rows(context_, 16);
  must(dispatch(0, 0, rows));
  finish(0, 0);
  groups_[0]->lose(1);
  must(dispatch(0, 1, rows));
  finish(0, 1);
  ASSERT_TRUE(groups_[0]->fault().has_value());
  EXPECT_EQ(groups_[0]->fault()->first, Fault::kDispatchTimeout);
}

TEST_P(MoeThreads, AnythingMayBeCalledWhileItIsClosed) {
  for (int turn = 0; turn < 10; ++turn) {
    form();
    const std::array<std::unique_ptr<Place>, 2> places = {std::make_unique<Place>(context_, 16),
                                                          std::make_unique<Place>(context_, 16)};
    std::vector<std::thread> threads;
    std::atomic<int> ready{0};
    for (uint32_t rank : {0U, 1U}) {
      threads.emplace_back([this, rank, &ready, &rows = *places[rank]] {
        ++ready;
        for (;;) {
          Status status = dispatch(rank, 0, rows);
          if (status) status = combine(rank, 0, rows);
          if (status) continue;
          EXPECT_EQ(status.error().code, ErrorCode::kClosed) << status.error().to_string();
          finish(rank, 0);
          return;
        }
      });
      threads.emplace_back([this, rank, &ready] {
        ++ready;
        for (int i = 0; i < 200; ++i) {
          groups_[rank]->fault();
          groups_[rank]->base();
          const auto descriptor = groups_[rank]->descriptor();
          EXPECT_TRUE(descriptor.ok() || descriptor.error().code == ErrorCode::kClosed);
        }
      });
    }
    while (ready != 4) std::this_thread::yield();
    // All at once: a GPU is idle when the launches of both groups have ended.
    for (uint32_t rank : {0U, 0U, 1U}) {
      threads.emplace_back([this, rank] { EXPECT_TRUE(groups_[rank]->close(kLong).ok()); });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace kvc::moe
