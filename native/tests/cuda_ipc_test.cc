// GPU memory of one allocation (cuMemAlloc) over the nvlink lane. Peers map it by its IPC handle. The tests check which
// peer maps it, when, and until when. In one process, they use the stand-in for the driver. It treats two domains as
// strangers, and aborts when memory is freed that another one still maps. In two processes, they use any driver.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/random.h"
#include "providers/nvlink/peer_memory.h"
#include "providers/nvlink/peer_regions.h"
#include "providers/nvlink/wire.h"
#include "tests/cuda_test_support.h"
#include "tests/domain_test_support.h"

namespace kvc {
namespace {

using test::Driven;
using test::driver_function;
using test::GpuBuffer;
using test::kLinkOfA;
using test::kLinkOfB;
using test::must;
using test::random_bytes;
using test::run_idle;
using test::run_until;

constexpr size_t kBytes = 1 << 20;
constexpr uint64_t kPage = 4096;

// A domain, and a buffer that is one of its regions.
struct End {
  struct Memory : GpuBuffer {
    using GpuBuffer::GpuBuffer;
  };
  End(const std::shared_ptr<cuda::Context>& gpu, uint64_t process, size_t bytes = kBytes)
      : memory(gpu, bytes),
        domain(std::make_unique<Driven>([=](ControlQueue& control) { return test::open_nvlink(process, control); })),
        rkey(must(domain->register_region(memory.data(), bytes), "register_region")) {}
  test::Record& record() const { return domain->record; }
  Memory memory;  // outlives the domain
  std::unique_ptr<Driven> domain;
  uint64_t rkey;
};

class CudaIpc : public test::Cuda {
 protected:
  void SetUp() override {
    Cuda::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    auto* const open = driver_function<int(int)>("fakeOpenOwnHandles");
    if (open == nullptr)
      GTEST_SKIP()
          << "needs the stand-in CUDA driver, because a real driver opens no handle in the process that exported it";
    open(1);
  }
  static int mappings(const GpuBuffer& memory) {
    return driver_function<int(cuda::DevicePointer)>("fakeIpcMappings")(memory.address);
  }
  // Ends the links. Afterwards neither side maps memory of the other side.
  static void part(End& a, End& b) {
    const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
    run_until(both, [&] { return a.domain->fence(kLinkOfA); }, "a's fence");
    run_until(both, [&] { return b.domain->fence(kLinkOfB); }, "b's fence");
    run_until(both, [&] { return a.domain->deregister_region(a.rkey) && b.domain->deregister_region(b.rkey); }, "both");
  }
};

test::Batch one_page(WorkId work, uint64_t at = 0) {
  return {.work = work, .page_bytes = kPage, .from = {at}, .to = {at}};
}

TEST_F(CudaIpc, PagesGoBothWays) {
  End a(first_, 1);
  End b(second_, 2);
  test::connect(*a.domain, *b.domain);
  EXPECT_EQ(mappings(b.memory), 1) << "with the link";
  EXPECT_TRUE(a.memory.is_synchronous()) << "the peer may be told to write right after a copy";
  a.memory.put(random_bytes(kBytes, 1));
  b.memory.put(random_bytes(kBytes, 2));
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  ASSERT_EQ(test::post(a, kLinkOfA, b, one_page(1, 8192)), Posted::kYes);
  ASSERT_EQ(test::post(b, kLinkOfB, a, one_page(2, 65536)), Posted::kYes);
  run_until(both, [&] { return a.record().succeeded(1) && b.record().succeeded(2); }, "both");
  EXPECT_EQ(std::memcmp(b.memory.get().data() + 8192, a.memory.get().data() + 8192, kPage), 0);
  EXPECT_EQ(std::memcmp(a.memory.get().data() + 65536, b.memory.get().data() + 65536, kPage), 0);
  EXPECT_EQ(mappings(a.memory), 1);
  part(a, b);
  EXPECT_EQ(mappings(a.memory) + mappings(b.memory), 0);
}

TEST_F(CudaIpc, WhatIsDeregisteredIsUnmappedByThePeersBeforeItMayBeFreed) {
  End a(first_, 1);
  End b(second_, 2);
  test::connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  for (int turn = 0; turn < 50; ++turn) {
    EXPECT_FALSE(b.domain->deregister_region(b.rkey)) << "a still has it mapped";
    b.domain->poll();
  }
  EXPECT_EQ(mappings(b.memory), 1);
  run_until(both, [&] { return b.domain->deregister_region(b.rkey); }, "a to let go");
  EXPECT_EQ(mappings(b.memory), 0);
  ASSERT_EQ(test::post(a, kLinkOfA, b, one_page(1)), Posted::kYes);
  run_until(both, [&] { return a.record().completed.contains(1); }, "the refusal");
  EXPECT_EQ(a.record().failure(1), ErrorCode::kUnknownRegion);

  // The same place on the board and the same allocation, as after a sleep.
  b.rkey = must(b.domain->register_region(b.memory.data(), kBytes));
  a.memory.put(random_bytes(kBytes, 3));
  ASSERT_EQ(test::post(a, kLinkOfA, b, one_page(2)), Posted::kYes);
  run_until(both, [&] { return a.record().succeeded(2); }, "the page");
  EXPECT_EQ(std::memcmp(b.memory.get().data(), a.memory.get().data(), kPage), 0);
  EXPECT_TRUE(a.record().down.empty() && b.record().down.empty());
  part(a, b);
}

TEST_F(CudaIpc, ARegionThatIsLargerThanItsAllocationIsNotWritten) {
  const End a(first_, 1);
  const GpuBuffer theirs(second_, kBytes);
  nvlink::RegionEntry entry{};
  entry.device = 1;
  entry.offset = 4096;
  entry.length = kBytes - 4096;
  {
    const cuda::Context::Scope scope(*second_);
    ASSERT_EQ(second_->driver().cuIpcGetMemHandle(&entry.allocation, theirs.address), cuda::kSuccess);
  }
  nvlink::PeerMemory memory(first_);
  nvlink::PeerRegion whole(1, entry, false);
  whole.map(memory);
  EXPECT_EQ(whole.state(), nvlink::PeerRegion::State::kReady);
  for (const auto& [offset, bytes] :
       {std::pair<uint64_t, uint64_t>{4096, kBytes - 4095}, {kBytes + 1, 1}, {8, ~0ULL}}) {
    entry.offset = offset;
    entry.length = bytes;
    nvlink::PeerRegion forged(2, entry, false);
    forged.map(memory);
    ASSERT_EQ(forged.state(), nvlink::PeerRegion::State::kFailed);
    EXPECT_EQ(forged.error().code, ErrorCode::kOutOfRange);
  }
}

TEST_F(CudaIpc, ACopyUnderWayKeepsTheMappingAndTheRegion) {
  End a(first_, 1);
  End b(second_, 2);
  test::connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  a.memory.put(random_bytes(kBytes, 1));
  {
    const test::HeldCopies held;
    ASSERT_EQ(test::post(a, kLinkOfA, b, one_page(1)), Posted::kYes);
    run_until(both, [&] { return held.count() == 1; }, "the copy");
    for (int turn = 0; turn < 100; ++turn) {
      EXPECT_FALSE(b.domain->deregister_region(b.rkey));
      for (Driven* domain : both) domain->poll();
    }
    EXPECT_EQ(mappings(b.memory), 1);
  }
  run_until(both, [&] { return b.domain->deregister_region(b.rkey); }, "the copy's end");
  EXPECT_TRUE(a.record().succeeded(1));
  EXPECT_EQ(mappings(b.memory), 0);
  EXPECT_EQ(std::memcmp(b.memory.get().data(), a.memory.get().data(), kPage), 0);
  part(a, b);
}

TEST_F(CudaIpc, RegionsOfOneAllocationShareItsMapping) {
  End a(first_, 1);
  End b(second_, 2);
  const uint64_t other = must(b.domain->register_region(b.memory.data() + kPage, kPage));
  test::connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  EXPECT_EQ(mappings(b.memory), 1);
  run_until(both, [&] { return b.domain->deregister_region(b.rkey); }, "the first");
  EXPECT_EQ(mappings(b.memory), 1) << "the other one is still registered";
  a.memory.put(random_bytes(kBytes, 1));
  test::Batch batch = one_page(1);
  batch.rkey = other;
  ASSERT_EQ(test::post(a, kLinkOfA, b, batch), Posted::kYes);
  run_until(both, [&] { return a.record().succeeded(1); }, "the page");
  EXPECT_EQ(std::memcmp(b.memory.get().data() + kPage, a.memory.get().data(), kPage), 0);
  b.rkey = other;
  run_until(both, [&] { return b.domain->deregister_region(other); }, "the second");
  EXPECT_EQ(mappings(b.memory), 0);
  part(a, b);
}

TEST_F(CudaIpc, ALinkThatEndedHereStillHasToBeReleasedByThePeer) {
  End a(first_, 1);
  End b(second_, 2);
  test::connect(*a.domain, *b.domain);
  test::fence(*b.domain, kLinkOfB);
  for (int turn = 0; turn < 50; ++turn) {
    EXPECT_FALSE(b.domain->deregister_region(b.rkey)) << "a has not heard of it";
    b.domain->poll();
  }
  EXPECT_EQ(mappings(b.memory), 1);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  run_until(both, [&] { return !a.record().down.empty(); }, "the news");
  for (int turn = 0; turn < 50; ++turn) {
    EXPECT_FALSE(b.domain->deregister_region(b.rkey)) << "a's copies may still be under way";
    for (Driven* domain : both) domain->poll();
  }
  run_until(both, [&] { return a.domain->fence(kLinkOfA); }, "a's fence");
  run_until(both, [&] { return b.domain->deregister_region(b.rkey); }, "a to let go");
  EXPECT_EQ(mappings(b.memory), 0);
  part(a, b);
}

TEST_F(CudaIpc, ADomainThatEndsWaitsForItsCopiesAndLetsGoOfAll) {
  auto* const waiting = driver_function<int()>("fakeWaitingForStreams");
  End b(second_, 2);
  auto a = std::make_unique<End>(first_, 1);
  a->memory.put(random_bytes(kBytes, 1));
  const std::vector<std::byte> page = a->memory.get();
  test::connect(*a->domain, *b.domain);
  const std::vector<Driven*> both = {a->domain.get(), b.domain.get()};
  auto held = std::make_unique<test::HeldCopies>();
  ASSERT_EQ(test::post(*a, kLinkOfA, b, one_page(1)), Posted::kYes);
  run_until(both, [&] { return held->count() == 1; }, "the copy");
  run_until(both, [&] { return a->domain->deregister_region(a->rkey); }, "b to let go");
  std::atomic<bool> ended{false};
  std::atomic<bool> waited{false};
  std::thread releases([&] {
    while (!ended && !waited) waited = waiting() > 0;
    held.reset();
  });
  a.reset();
  ended = true;
  releases.join();
  EXPECT_TRUE(waited);
  EXPECT_EQ(mappings(b.memory), 0);
  EXPECT_EQ(std::memcmp(b.memory.get().data(), page.data(), kPage), 0);
  run_until({b.domain.get()}, [&] { return !b.record().down.empty(); }, "the news");
  run_until({b.domain.get()}, [&] { return b.domain->deregister_region(b.rkey); }, "the region");
}

TEST_F(CudaIpc, NothingIsMappedOnTheDomainsThread) {
  End a(first_, 1);
  End b(second_, 2);
  test::connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  run_idle(both);
  const GpuBuffer later(second_, kBytes);
  const uint64_t rkey = must(b.domain->register_region(later.data(), later.bytes));
  test::Batch batch = one_page(1);
  batch.rkey = rkey;
  ASSERT_EQ(test::post(a, kLinkOfA, b, batch), Posted::kYes);
  const auto turns = [&] {  // turns of the domains only, without their control threads
    for (int turn = 0; turn < 100; ++turn) {
      for (Driven* domain : both) domain->domain().poll();
    }
  };
  turns();
  EXPECT_EQ(mappings(later), 0);
  EXPECT_FALSE(a.record().completed.contains(1)) << "it waits";
  run_until(both, [&] { return a.record().succeeded(1); }, "the page");
  EXPECT_EQ(mappings(later), 1);
  EXPECT_FALSE(b.domain->deregister_region(rkey));
  turns();
  EXPECT_EQ(mappings(later), 1) << "nor unmapped there";
  EXPECT_FALSE(b.domain->deregister_region(rkey));
  run_until(both, [&] { return b.domain->deregister_region(rkey); }, "a to let go");
  part(a, b);
}

TEST_F(CudaIpc, NoWriteOrMappingPrecedesTheLinkOfThePeersDomain) {
  End a(first_, 1);
  End b(second_, 2);
  const uint64_t gone = must(b.domain->register_region(b.memory.data() + kPage, kPage));
  const Bytes offer = must(a.domain->offer(kLinkOfA), "offer");
  Connector::Accepted accepted = must(b.domain->connector().accept(kLinkOfB, offer), "accept");
  must(a.domain->complete(kLinkOfA, accepted.answer));
  ASSERT_EQ(test::post(a, kLinkOfA, b, one_page(1)), Posted::kYes);
  run_idle({a.domain.get(), b.domain.get()});
  EXPECT_FALSE(a.record().completed.contains(1));
  EXPECT_EQ(mappings(b.memory), 0);
  EXPECT_TRUE(a.domain->prepare_sleep()) << "nothing to do but to wait";
  EXPECT_TRUE(b.domain->deregister_region(gone)) << "nobody can have it mapped";
  b.domain->domain().attach(kLinkOfB, std::move(accepted.end));
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().succeeded(1); }, "the page");
  EXPECT_EQ(b.record().counted, 1U);
  part(a, b);
}

TEST_F(CudaIpc, ALinkThatIsNeverTakenOverLetsGoOfWhatItHasMapped) {
  End a(first_, 1);
  End b(second_, 2);
  const Bytes offer = must(a.domain->offer(kLinkOfA), "offer");
  const Bytes answer = must(b.domain->accept(kLinkOfB, offer), "accept");
  {
    const auto end = must(a.domain->connector().complete(kLinkOfA, answer), "complete");
    EXPECT_EQ(mappings(b.memory), 1);
    EXPECT_FALSE(b.domain->deregister_region(b.rkey));
  }
  EXPECT_EQ(mappings(b.memory), 0);
  run_until({b.domain.get()}, [&] { return !b.record().down.empty(); }, "the news");
  run_until({b.domain.get()}, [&] { return b.domain->deregister_region(b.rkey); }, "the region");
}

// Bytes of memory behind the boards of this process.
uint64_t board_bytes() {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    if (std::filesystem::read_symlink(entry, error).string().find("kvc-nvlink-board") == std::string::npos) continue;
    struct stat status{};
    if (stat(entry.path().c_str(), &status) == 0) bytes += static_cast<uint64_t>(status.st_blocks) * 512;
  }
  return bytes;
}

TEST_F(CudaIpc, ThousandsOfRegionsAndABoardThatCostsWhatIsUsed) {
  constexpr size_t kRegions = 3000;
  static_assert(kRegions < nvlink::kMaxRegions);
  End a(first_, 1);
  End b(second_, 2, kRegions * kPage);
  test::connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  run_idle(both);
  EXPECT_LE(board_bytes(), 4 * 4096U) << "two boards with a region each";
  std::vector<uint64_t> rkeys;
  for (size_t i = 0; i < kRegions; ++i) {
    rkeys.push_back(must(b.domain->register_region(b.memory.data() + i * kPage, kPage)));
  }
  run_idle(both);
  EXPECT_EQ(mappings(b.memory), 1);
  EXPECT_LE(board_bytes(), (kRegions + 2) * sizeof(nvlink::RegionEntry) + 4 * 4096);
  a.memory.put(random_bytes(kBytes, 1));
  for (const size_t region : {size_t{0}, size_t{1234}, kRegions - 1}) {
    test::Batch batch = one_page(region + 1);
    batch.rkey = rkeys[region];
    ASSERT_EQ(test::post(a, kLinkOfA, b, batch), Posted::kYes);
    run_until(both, [&] { return a.record().succeeded(region + 1); }, "a page");
    EXPECT_EQ(std::memcmp(b.memory.get().data() + region * kPage, a.memory.get().data(), kPage), 0);
  }
  // All at once, as when weights are freed.
  run_until(
      both,
      [&] {
        std::erase_if(rkeys, [&](uint64_t rkey) { return b.domain->deregister_region(rkey); });
        return rkeys.empty();
      },
      "all of them");
  part(a, b);
}

TEST_F(CudaIpc, WhatIsCountedIsWhatSucceededAlsoWhereTheRingWasFull) {
  constexpr size_t kBatches = same_host::kRingEntries + 100;
  End a(first_, 1);
  End b(second_, 2);
  test::connect(*a.domain, *b.domain);
  const std::vector<PageWrite> none(1);
  const auto post = [&](WorkId work) {
    return a.domain->post(kLinkOfA, {.work = work, .counted = true, .immediate = test::immediate_of(1), .pages = none});
  };
  WorkId posted = 0;
  run_until(
      {a.domain.get()},
      [&] {
        while (posted < kBatches && post(posted + 1) == Posted::kYes) ++posted;
        return posted == kBatches && a.record().completed.size() == same_host::kRingEntries;
      },
      "a full ring");
  run_idle({a.domain.get()});
  EXPECT_TRUE(a.domain->prepare_sleep()) << "the peer wakes it when there is room";
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  run_until(both, [&] { return b.domain->fence(kLinkOfB); }, "the fence");
  run_until(both, [&] { return a.domain->fence(kLinkOfA); }, "the sender's");
  size_t succeeded = 0;
  for (const auto& [work, error] : a.record().completed) succeeded += error ? 0 : 1;
  EXPECT_EQ(a.record().completed.size(), kBatches);
  EXPECT_EQ(b.record().counted, succeeded);
  EXPECT_GE(succeeded, size_t{same_host::kRingEntries});
  part(a, b);
}

TEST_F(CudaIpc, AGpuThatBreaksDownTakesTheLinksWithIt) {
  auto* const break_down = driver_function<int(int)>("fakeBreak");
  End a(first_, 1);
  End b(second_, 2);
  test::connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  {
    const test::HeldCopies held;
    ASSERT_EQ(test::post(a, kLinkOfA, b, one_page(1)), Posted::kYes);
    run_until(both, [&] { return held.count() == 1; }, "the copy");
    break_down(1);
    ASSERT_EQ(test::post(a, kLinkOfA, b, one_page(2)), Posted::kYes);
    run_until(both, [&] { return !a.record().down.empty(); }, "the link's end");
  }
  run_until(both, [&] { return a.domain->fence(kLinkOfA); }, "the fence");
  EXPECT_EQ(a.record().completed.size(), 2U);
  EXPECT_FALSE(a.record().succeeded(1) || a.record().succeeded(2));
  EXPECT_NE(a.record().down[0].error.message.find("CUDA_ERROR"), std::string::npos) << a.record().down[0].error.message;
  break_down(0);
  part(a, b);
}

// As in close() when the GPU is busy for longer than its limit: the copies end later, and their completions are never
// seen.
TEST_F(CudaIpc, ADomainThatEndsWithCopiesUnderWayIsFencedWhenTheyHaveEnded) {
  End a(first_, 1);
  End b(second_, 2);
  test::connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  {
    const test::HeldCopies held;
    ASSERT_EQ(test::post(a, kLinkOfA, b, one_page(1)), Posted::kYes);
    run_until(both, [&] { return held.count() == 1; }, "the copy");
  }
  a.domain.reset();
  run_until({b.domain.get()}, [&] { return b.domain->fence(kLinkOfB); }, "the fence");
  run_until({b.domain.get()}, [&] { return b.domain->deregister_region(b.rkey); }, "the region's end");
}

TEST_F(CudaIpc, MessagesPass) {
  End a(first_, 1);
  End b(second_, 2);
  test::connect(*a.domain, *b.domain);
  const std::byte message[] = {std::byte{4}, std::byte{2}};
  b.record().message_room = 0;
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  for (WorkId work = 1; work <= kMessageSlots; ++work) {
    ASSERT_EQ(a.domain->send(kLinkOfA, work, message), Posted::kYes);
  }
  EXPECT_EQ(a.domain->send(kLinkOfA, 99, message), Posted::kBusy);
  run_idle(both);
  EXPECT_TRUE(a.record().completed.empty()) << "nobody has taken them";
  b.record().message_room = SIZE_MAX;
  run_until(both, [&] { return a.record().completed.size() == kMessageSlots; }, "the messages");
  EXPECT_EQ(b.record().messages.size(), kMessageSlots);
  EXPECT_EQ(b.record().messages[0].second, Bytes({std::byte{4}, std::byte{2}}));
  part(a, b);
}

// --- With any driver

class CudaNvlink : public test::Cuda {};

TEST_F(CudaNvlink, DomainsOfOneProcessWriteWithoutAMapping) {
  End a(first_, 7);
  End b(second_, 7);
  test::connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  a.memory.put(random_bytes(kBytes, 1));
  ASSERT_EQ(test::post(a, kLinkOfA, b, one_page(1, 8192)), Posted::kYes);
  run_until(both, [&] { return a.record().succeeded(1); }, "the page");
  EXPECT_EQ(std::memcmp(b.memory.get().data() + 8192, a.memory.get().data() + 8192, kPage), 0);
  EXPECT_TRUE(b.domain->deregister_region(b.rkey)) << "nobody has to let go";
  ASSERT_EQ(test::post(a, kLinkOfA, b, one_page(2)), Posted::kYes);
  run_until(both, [&] { return a.record().completed.contains(2); }, "the refusal");
  EXPECT_EQ(a.record().failure(2), ErrorCode::kUnknownRegion);
}

TEST_F(CudaNvlink, MemoryThatIsRegisteredAgainInOneProcessIsWritten) {
  End a(first_, 7);
  End b(second_, 7);
  test::connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  a.memory.put(random_bytes(kBytes, 1));
  ASSERT_EQ(test::post(a, kLinkOfA, b, one_page(1)), Posted::kYes);
  run_until(both, [&] { return a.record().succeeded(1); }, "the page");
  const uint64_t before = b.rkey;
  ASSERT_TRUE(b.domain->deregister_region(before));
  b.rkey = must(b.domain->register_region(b.memory.data(), kBytes));
  ASSERT_EQ(nvlink::place_of(b.rkey), nvlink::place_of(before));
  ASSERT_EQ(test::post(a, kLinkOfA, b, one_page(2, 8192)), Posted::kYes);
  run_until(both, [&] { return a.record().succeeded(2); }, "the page after the registration");
  EXPECT_EQ(std::memcmp(b.memory.get().data() + 8192, a.memory.get().data() + 8192, kPage), 0);
}

TEST_F(CudaNvlink, NothingOfItIsAConcernOfAStreamCapture) {
  const GpuBuffer source(first_, kBytes);
  const GpuBuffer target(second_, kBytes);
  source.put(random_bytes(kBytes, 1));
  test::Capturing capture(first_);
  {
    Driven a([](ControlQueue& control) { return test::open_nvlink(7, control); });
    Driven b([](ControlQueue& control) { return test::open_nvlink(7, control); });
    must(a.register_region(source.data(), kBytes));
    const uint64_t rkey = must(b.register_region(target.data(), kBytes));
    test::connect(a, b);
    const PageWrite page{source.data(), 0};
    const auto post = [&](WorkId work) {
      return a.post(kLinkOfA, {.work = work, .rkey = rkey, .page_bytes = kPage, .pages = {&page, 1}});
    };
    {
      const test::HeldCopies held;
      ASSERT_EQ(post(1), Posted::kYes);
      for (int turn = 0; turn < 3000; ++turn) a.poll();  // the GPU's health is checked in these turns
    }
    run_until({&a, &b}, [&] { return a.record.completed.contains(1); }, "the page");
    EXPECT_TRUE(a.record.succeeded(1));
    run_until({&a, &b}, [&] { return a.fence(kLinkOfA) && b.fence(kLinkOfB); }, "the fences");
  }
  EXPECT_EQ(capture.end(), cuda::kSuccess);
}

// --- Two processes

// Another process, which runs a test, and the messages between the two.
class OtherProcess {
 public:
  explicit OtherProcess(const char* test) {
    std::array<int, 2> ends{};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()) != 0) throw std::runtime_error("socketpair");
    const std::string number = std::to_string(ends[1]);
    pid_ = fork();
    if (pid_ == 0) {
      setenv(kVariable, number.c_str(), 1);
      close(ends[0]);
      test::become_test(test);
    }
    close(ends[1]);
    socket_ = UniqueFd(ends[0]);
  }
  // In the other process: refers to the process that started it.
  OtherProcess() {
    if (const char* number = std::getenv(kVariable)) socket_ = UniqueFd(std::atoi(number));
  }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;

  bool is_there() const { return static_cast<bool>(socket_); }
  void say(const Bytes& bytes) const {
    ASSERT_EQ(write(socket_.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  void say(uint64_t number) const {
    say(Bytes(reinterpret_cast<std::byte*>(&number), reinterpret_cast<std::byte*>(&number + 1)));
  }
  // Returns the next message; blocks.
  Bytes hear() const {
    Bytes bytes(1 << 16);
    const ssize_t length = read(socket_.get(), bytes.data(), bytes.size());
    bytes.resize(length > 0 ? static_cast<size_t>(length) : 0);
    return bytes;
  }
  uint64_t hear_number() const {
    const Bytes bytes = hear();
    uint64_t number = 0;
    if (bytes.size() == sizeof(number)) std::memcpy(&number, bytes.data(), sizeof(number));
    return number;
  }
  bool has_spoken() const {
    pollfd entry{socket_.get(), POLLIN, 0};
    return poll(&entry, 1, 0) == 1;
  }
  void die() const { kill(pid_, SIGKILL); }
  // Returns true if the process has ended. status() is then its exit status, or -1 if it was killed.
  bool has_ended() {
    if (pid_ > 0 && waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = 0;
    return pid_ == 0;
  }
  int status() const { return WIFEXITED(status_) ? WEXITSTATUS(status_) : -1; }

 private:
  static constexpr const char* kVariable = "KVC_TEST_OTHER_PROCESS";
  pid_t pid_ = 0;
  int status_ = 0;
  UniqueFd socket_;
};

using CudaProcess = test::Cuda;

// Fills the other process's region, and ends when it is asked to.
TEST_F(CudaProcess, DISABLED_Writes) {
  const OtherProcess receiver;
  ASSERT_TRUE(receiver.is_there()) << "another test runs this one";
  const GpuBuffer memory(first_, kBytes);
  memory.put(random_bytes(kBytes, 5));
  Driven domain([](ControlQueue& control) { return test::open_nvlink(random_key(), control); });
  const uint64_t own = must(domain.register_region(memory.data(), kBytes));
  receiver.say(must(domain.accept(kLinkOfA, receiver.hear())));
  const uint64_t rkey = receiver.hear_number();
  for (WorkId work = 0; work < kBytes / kPage / 64; ++work) {
    std::vector<PageWrite> pages;
    for (uint64_t i = 0; i < 64; ++i)
      pages.push_back({memory.data() + (work * 64 + i) * kPage, (work * 64 + i) * kPage});
    ASSERT_EQ(domain.post(kLinkOfA, {.work = work,
                                     .rkey = rkey,
                                     .page_bytes = kPage,
                                     .counted = true,
                                     .immediate = test::immediate_of(64),
                                     .pages = pages}),
              Posted::kYes);
    run_until({&domain}, [&] { return domain.record.completed.contains(work); }, "a batch");
    ASSERT_TRUE(domain.record.succeeded(work));
  }
  receiver.say(rkey);
  run_until({&domain}, [&] { return receiver.has_spoken(); }, "the receiver's word");
  test::fence(domain, kLinkOfA);
  run_until({&domain}, [&] { return domain.deregister_region(own); }, "the receiver to let go");
}

// Makes its end of a link and never attaches it.
TEST_F(CudaProcess, DISABLED_Completes) {
  const OtherProcess other;
  ASSERT_TRUE(other.is_there()) << "another test runs this one";
  const GpuBuffer memory(first_, kBytes);
  Driven domain([](ControlQueue& control) { return test::open_nvlink(random_key(), control); });
  must(domain.register_region(memory.data(), kBytes));
  other.say(must(domain.offer(kLinkOfA)));
  auto end = must(domain.connector().complete(kLinkOfA, other.hear()));
  end.reset();
  other.say(1);
  EXPECT_EQ(other.hear_number(), 2U);  // waits until the test is done with it
}

TEST_F(CudaProcess, CompletingWithoutATakeoverLeavesNothingMapped) {
  OtherProcess other("CudaProcess.DISABLED_Completes");
  const GpuBuffer memory(second_, kBytes);
  Driven domain([](ControlQueue& control) { return test::open_nvlink(random_key(), control); });
  const uint64_t rkey = must(domain.register_region(memory.data(), kBytes));
  other.say(must(domain.accept(kLinkOfB, other.hear())));
  EXPECT_EQ(other.hear_number(), 1U);
  run_until({&domain}, [&] { return !domain.record.down.empty(); }, "the link's end");
  test::fence(domain, kLinkOfB);
  run_until({&domain}, [&] { return domain.deregister_region(rkey); }, "the region");
  other.say(2);
  run_until({&domain}, [&] { return other.has_ended(); }, "the other's end");
  EXPECT_EQ(other.status(), 0);
}

// Ends its domain while a copy is in flight, as close() does when the GPU is busy for longer than its limit. The
// process lives on.
TEST_F(CudaProcess, DISABLED_EndsItsDomainBeforeItsCopy) {
  const OtherProcess receiver;
  ASSERT_TRUE(receiver.is_there()) << "another test runs this one";
  const GpuBuffer memory(first_, kBytes);
  auto domain =
      std::make_unique<Driven>([](ControlQueue& control) { return test::open_nvlink(random_key(), control); });
  must(domain->register_region(memory.data(), kBytes));
  receiver.say(must(domain->accept(kLinkOfA, receiver.hear())));
  const uint64_t rkey = receiver.hear_number();
  const PageWrite page{memory.data(), 0};
  {
    const test::HeldCopies held;
    ASSERT_EQ(domain->post(kLinkOfA, {.work = 1, .rkey = rkey, .page_bytes = kPage, .pages = {&page, 1}}),
              Posted::kYes);
    run_until({domain.get()}, [&] { return held.count() == 1; }, "the copy");
  }
  domain.reset();
  receiver.say(1);
  EXPECT_EQ(receiver.hear_number(), 2U);  // it is fenced
}

// A peer in this process has no pidfd, and the end of its socket is enough. So this test needs two processes.
TEST_F(CudaProcess, ADomainThatEndedBeforeItsCopyIsFencedWhileItsProcessLives) {
  if (!test::HeldCopies::possible())
    GTEST_SKIP() << "needs the stand-in CUDA driver, because a real driver cannot hold copies back";
  OtherProcess sender("CudaProcess.DISABLED_EndsItsDomainBeforeItsCopy");
  const GpuBuffer memory(second_, kBytes);
  Driven domain([](ControlQueue& control) { return test::open_nvlink(random_key(), control); });
  const uint64_t rkey = must(domain.register_region(memory.data(), kBytes));
  sender.say(must(domain.offer(kLinkOfB)));
  must(domain.complete(kLinkOfB, sender.hear()));
  sender.say(rkey);
  run_until({&domain}, [&] { return sender.has_spoken(); }, "the sender's word");
  ASSERT_EQ(sender.hear_number(), 1U);
  test::fence(domain, kLinkOfB);
  run_until({&domain}, [&] { return domain.deregister_region(rkey); }, "the region's end");
  run_idle({&domain});  // the sender frees its memory next: it must not be mapped here any more
  EXPECT_FALSE(sender.has_ended());
  sender.say(2);
  run_until({&domain}, [&] { return sender.has_ended(); }, "the sender's end");
  EXPECT_EQ(sender.status(), 0);
}

class CudaProcesses : public test::Cuda, public testing::WithParamInterface<bool> {};

INSTANTIATE_TEST_SUITE_P(Sender, CudaProcesses, testing::Bool(),
                         [](const auto& dies) { return dies.param ? "Dies" : "Lives"; });

TEST_P(CudaProcesses, MemoryIsFreedWhenNoProcessHasItMappedAnyMore) {
  OtherProcess sender("CudaProcess.DISABLED_Writes");
  auto memory = std::make_unique<GpuBuffer>(second_, kBytes);
  Driven domain([](ControlQueue& control) { return test::open_nvlink(random_key(), control); });
  const uint64_t rkey = must(domain.register_region(memory->data(), kBytes));
  sender.say(must(domain.offer(kLinkOfB)));
  must(domain.complete(kLinkOfB, sender.hear()));
  sender.say(rkey);
  run_until({&domain}, [&] { return sender.has_spoken(); }, "the pages");
  ASSERT_EQ(sender.hear_number(), rkey);
  run_until({&domain}, [&] { return domain.record.counted == kBytes / kPage; }, "the count");
  EXPECT_TRUE(memory->get() == random_bytes(kBytes, 5));
  if (GetParam()) sender.die();  // ends its mappings without a message
  run_until({&domain}, [&] { return domain.deregister_region(rkey); }, "the sender to let go");
  memory.reset();  // the stand-in aborts if the memory is mapped anywhere
  if (!GetParam()) sender.say(rkey);
  run_until({&domain}, [&] { return !domain.record.down.empty(); }, "the link's end");
  test::fence(domain, kLinkOfB);
  run_until({&domain}, [&] { return sender.has_ended(); }, "the sender's end");
  EXPECT_EQ(sender.status(), GetParam() ? -1 : 0);
}

}  // namespace
}  // namespace kvc
