// GPU memory in pieces (cuMemCreate, cuMemMap) over the nvlink lane, in one process. Its two domains treat each other
// as strangers, and map each other's memory by descriptors. Uses the machine's CUDA driver, or its stand-in.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "cuda/virtual_memory.h"
#include "engine/transfer_engine.h"
#include "providers/nvlink/connector.h"
#include "providers/nvlink/domain.h"
#include "providers/nvlink/peer_regions.h"
#include "tests/cuda_test_support.h"
#include "tests/domain_test_support.h"

namespace kvc::test::cuda_vmm {
namespace {

struct MemoryLocation {  // CUmemLocation
  int type = 1;          // CU_MEM_LOCATION_TYPE_DEVICE
  int device = 0;
};
struct AllocationProperties {  // CUmemAllocationProp
  int type = 1;                // CU_MEM_ALLOCATION_TYPE_PINNED
  int handle_types = 0;
  MemoryLocation location;
  void* windows = nullptr;
  unsigned char flags[8] = {};
};

size_t granularity(int device) {
  const AllocationProperties properties{.handle_types = 1, .location = {.device = device}};
  size_t bytes = 0;
  auto* const get = driver_function<int(size_t*, const AllocationProperties*, int)>("cuMemGetAllocationGranularity");
  EXPECT_EQ(get(&bytes, &properties, 0), cuda::kSuccess);
  return bytes;
}

// Reserved addresses, with pieces mapped contiguously from their beginning.
class Segment {
 public:
  // Creates pieces of the given numbers of granules. `exportable` has one value for each piece, or one for all. `hole`:
  // granules after them that stay unmapped.
  Segment(const std::shared_ptr<cuda::Context>& gpu, const std::vector<size_t>& granules,
          const std::vector<bool>& exportable = {true}, size_t hole = 0)
      : context_(gpu), granule_(granularity(gpu->device())) {
    const cuda::Driver& driver = context_->driver();
    reserved_ = (std::accumulate(granules.begin(), granules.end(), size_t{0}) + hole) * granule_;
    EXPECT_EQ(driver.cuMemAddressReserve(&address, reserved_, 0, 0, 0), cuda::kSuccess);
    auto* const create =
        driver_function<int(cuda::AllocationHandle*, size_t, const AllocationProperties*, unsigned long long)>(
            "cuMemCreate");
    for (size_t i = 0; i < granules.size(); ++i) {
      const AllocationProperties properties{.handle_types = exportable[i % exportable.size()] ? 1 : 0,
                                            .location = {.device = context_->device()}};
      const size_t size = granules[i] * granule_;
      cuda::AllocationHandle handle = 0;
      EXPECT_EQ(create(&handle, size, &properties, 0), cuda::kSuccess);
      EXPECT_EQ(driver.cuMemMap(address + bytes, size, 0, handle, 0), cuda::kSuccess);
      EXPECT_EQ(driver.cuMemRelease(handle), cuda::kSuccess);
      const cuda::MemoryAccess access{1, context_->device(), 3};
      EXPECT_EQ(driver.cuMemSetAccess(address + bytes, size, &access, 1), cuda::kSuccess);
      pieces_.push_back(size);
      bytes += size;
    }
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() {
    DevicePointer at = address;
    for (const size_t size : pieces_) {
      EXPECT_EQ(context_->driver().cuMemUnmap(at, size), cuda::kSuccess);
      at += size;
    }
    EXPECT_EQ(context_->driver().cuMemAddressFree(address, reserved_), cuda::kSuccess);
  }

  std::byte* data() const { return reinterpret_cast<std::byte*>(address); }
  size_t granule() const { return granule_; }
  void put(size_t offset, const std::vector<std::byte>& bytes_to_put) const {
    const cuda::Context::Scope scope(*context_);
    EXPECT_EQ(context_->driver().cuMemcpyHtoD_v2(address + offset, bytes_to_put.data(), bytes_to_put.size()),
              cuda::kSuccess);
    driver_function<int()>("cuCtxSynchronize")();
  }
  std::vector<std::byte> get(size_t offset, size_t count) const {
    std::vector<std::byte> data(count);
    const cuda::Context::Scope scope(*context_);
    EXPECT_EQ(context_->driver().cuMemcpyDtoH_v2(data.data(), address + offset, count), cuda::kSuccess);
    return data;
  }

  using DevicePointer = cuda::DevicePointer;
  DevicePointer address = 0;
  size_t bytes = 0;  // mapped bytes

 private:
  const std::shared_ptr<cuda::Context> context_;
  const size_t granule_;
  size_t reserved_ = 0;
  std::vector<size_t> pieces_;
};

// A domain that claims to be of a separate process.
struct End {
  explicit End(uint64_t process)
      : domain(std::make_unique<Driven>([=](ControlQueue& control) { return open_nvlink(process, control); })) {}
  uint64_t add(const Segment& segment, size_t offset, size_t bytes) {
    memory.at = segment.data() + offset;
    return rkey = must(domain->register_region(memory.at, bytes), "register_region");
  }

  struct View {
    std::byte* at = nullptr;
    std::byte* data() const { return at; }
  };
  Record& record() const { return domain->record; }
  std::unique_ptr<Driven> domain;
  View memory;  // of the last region
  uint64_t rkey = 0;
};

class CudaVmm : public Cuda {
 protected:
  void TearDown() override { fail_imports(false); }

  // Returns false with a real driver, whose failures cannot be set.
  static bool fail_imports(bool fail) {
    auto* const hook = driver_function<int(int)>("fakeFailImports");
    if (hook != nullptr) hook(fail ? 1 : 0);
    return hook != nullptr;
  }
  // No value with a real driver, which does not report it.
  static std::optional<int> mapped_pieces() {
    auto* const count = driver_function<int()>("fakeMappedPieces");
    return count != nullptr ? std::optional(count()) : std::nullopt;
  }
};

constexpr size_t kPage = 65536;

TEST_F(CudaVmm, PagesGoIntoAndOutOfARegionOfSeveralPieces) {
  const Segment here(first_, {2, 1, 1});
  const Segment there(second_, {1, 2, 1});
  constexpr size_t kShift = 300000;  // offset of the regions in their first pieces
  End a(1);
  End b(2);
  a.add(here, kShift, here.bytes - kShift);
  b.add(there, kShift, there.bytes - kShift - 4096);
  connect(*a.domain, *b.domain);
  // A page across each border between pieces, one at the beginning, and one at the end.
  std::vector<uint64_t> to = {0, there.bytes - kShift - 4096 - kPage};
  std::vector<uint64_t> from = {4096, 100000};
  for (size_t border = 1; border < 4; ++border) {
    to.push_back(border * there.granule() - kShift - kPage / 2);
    from.push_back(border * here.granule() - kShift - kPage / 4);
  }
  const auto same = [&](const Segment& source, const Segment& target, const std::vector<uint64_t>& read,
                        const std::vector<uint64_t>& written) {
    for (size_t i = 0; i < read.size(); ++i) {
      if (source.get(kShift + read[i], kPage) != target.get(kShift + written[i], kPage)) return false;
    }
    return true;
  };
  here.put(0, random_bytes(here.bytes, 1));
  there.put(0, std::vector<std::byte>(there.bytes));
  ASSERT_EQ(post(a, kLinkOfA, b, {.work = 1, .page_bytes = kPage, .from = from, .to = to}), Posted::kYes);
  run_until({a.domain.get(), b.domain.get()},
            [&] { return a.record().succeeded(1) && b.record().counted == to.size(); });
  EXPECT_TRUE(same(here, there, from, to));
  EXPECT_EQ(there.get(0, kShift), std::vector<std::byte>(kShift)) << "what lies before the region";

  there.put(0, random_bytes(there.bytes, 2));
  ASSERT_EQ(post(b, kLinkOfB, a, {.work = 2, .page_bytes = kPage, .from = to, .to = from}), Posted::kYes);
  run_until({a.domain.get(), b.domain.get()},
            [&] { return b.record().succeeded(2) && a.record().counted == to.size(); });
  EXPECT_TRUE(same(there, here, to, from));

  const uint64_t end = there.bytes - kShift - 4096;
  ASSERT_EQ(post(a, kLinkOfA, b, {.work = 3, .page_bytes = kPage, .from = {0}, .to = {end - kPage + 1}}), Posted::kYes);
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().completed.contains(3); });
  EXPECT_EQ(a.record().failure(3), ErrorCode::kOutOfRange);
}

TEST_F(CudaVmm, ItsContextIsMadeSynchronousAsPiecesCannotBe) {
  constexpr unsigned kSyncMemops = 0x80;  // CU_CTX_SYNC_MEMOPS
  if (driver_->cuCtxSetFlags == nullptr)
    GTEST_SKIP() << "needs a driver of CUDA 12.1 or newer, which has cuCtxSetFlags";
  const Segment segment(first_, {1});
  End a(1);
  a.add(segment, 0, segment.bytes);
  const cuda::Context::Scope scope(*first_);
  unsigned flags = 0;
  EXPECT_EQ(driver_->cuCtxGetFlags(&flags), cuda::kSuccess);
  EXPECT_NE(flags & kSyncMemops, 0U);
}

TEST_F(CudaVmm, MemoryThatIsRegisteredLaterComesOverTheLinksThatThereAre) {
  const Segment here(first_, {1});
  const Segment there(second_, {1, 1});
  End a(1);
  End b(2);
  a.add(here, 0, here.bytes);
  b.add(there, 0, 4096);
  connect(*a.domain, *b.domain);
  run_idle({a.domain.get(), b.domain.get()});
  const Segment later(second_, {1, 3, 1});
  b.add(later, 4096, later.bytes - 4096);
  const uint64_t last = later.bytes - 4096 - kPage;
  here.put(0, random_bytes(2 * kPage, 3));
  ASSERT_EQ(post(a, kLinkOfA, b, {.work = 1, .page_bytes = kPage, .from = {0, kPage}, .to = {0, last}}), Posted::kYes);
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().succeeded(1) && b.record().counted == 2; });
  EXPECT_EQ(later.get(4096, kPage), here.get(0, kPage));
  EXPECT_EQ(later.get(4096 + last, kPage), here.get(kPage, kPage));
}

TEST_F(CudaVmm, WhatWasSentAheadAndIsGoneByTheTimeOfTheLinkIsForgotten) {
  const Segment here(first_, {1});
  const Segment before(second_, {1, 1, 1});
  const Segment there(second_, {2, 1});
  const std::optional<int> mapped = mapped_pieces();
  End a(1);
  End b(2);
  a.add(here, 0, here.bytes);
  b.add(before, 0, before.bytes);
  const Bytes offer = must(a.domain->offer(kLinkOfA), "offer");
  Connector::Accepted accepted = must(b.domain->connector().accept(kLinkOfB, offer), "accept");
  ASSERT_TRUE(b.domain->deregister_region(b.rkey));
  b.add(there, 0, there.bytes);  // at its place on the board
  b.domain->domain().attach(kLinkOfB, std::move(accepted.end));
  must(a.domain->complete(kLinkOfA, accepted.answer));
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  here.put(0, random_bytes(kPage, 3));
  const uint64_t last = there.bytes - kPage;
  ASSERT_EQ(post(a, kLinkOfA, b, {.work = 1, .page_bytes = kPage, .from = {0}, .to = {last}}), Posted::kYes);
  run_until(both, [&] { return a.record().succeeded(1); });
  EXPECT_EQ(there.get(last, kPage), here.get(0, kPage));
  run_idle(both);
  if (mapped) {
    EXPECT_EQ(*mapped_pieces(), *mapped + 3) << "two of b's, and one of a's";
  }
}

TEST_F(CudaVmm, ManyPiecesComeWhileTheFirstBatchWaitsForThem) {
  constexpr size_t kPieces = 20 * nvlink::kUntakenPieces;
  const Segment here(first_, {1});
  const Segment there(second_, std::vector<size_t>(kPieces, 1));
  const std::optional<int> before = mapped_pieces();
  End a(1);
  End b(2);
  a.add(here, 0, here.bytes);
  b.add(there, 12288, there.bytes - 12288);
  connect(*a.domain, *b.domain);
  here.put(0, random_bytes(2 * kPage, 4));
  const uint64_t last = there.bytes - 12288 - kPage;
  ASSERT_EQ(post(a, kLinkOfA, b, {.work = 1, .page_bytes = kPage, .from = {0, kPage}, .to = {0, last}}), Posted::kYes);
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().succeeded(1) && b.record().counted == 2; });
  EXPECT_EQ(there.get(12288, kPage), here.get(0, kPage));
  EXPECT_EQ(there.get(12288 + last, kPage), here.get(kPage, kPage));
  run_idle({a.domain.get(), b.domain.get()});
  if (before) {
    EXPECT_EQ(*mapped_pieces(), *before + static_cast<int>(kPieces) + 1) << "each side maps the other's";
  }
  fence(*a.domain, kLinkOfA);
  run_until({a.domain.get(), b.domain.get()}, [&] { return b.record().down.size() == 1; });
  fence(*b.domain, kLinkOfB);
  run_idle({a.domain.get(), b.domain.get()});
  if (before) {
    EXPECT_EQ(mapped_pieces(), before);
  }
}

TEST_F(CudaVmm, MemoryThatHasNoDescriptorIsRefusedWithWhatToTurnOff) {
  const auto engine = must(TransferEngine::create(config("engine", "nvlink")), "create");
  const Segment all(first_, {1}, {false});
  const Segment second(first_, {1, 1}, {true, false});
  for (const Segment* segment : {&all, &second}) {
    const Result<RegionId> region = engine->register_memory(segment->data(), segment->bytes);
    ASSERT_FALSE(region.ok());
    EXPECT_EQ(region.error().code, ErrorCode::kRefused);
    EXPECT_NE(region.error().message.find("sleep mode"), std::string::npos) << region.error().message;
  }
  must(engine->register_memory(second.data(), second.granule()), "the piece that has one");
}

TEST_F(CudaVmm, ARegionWithAHoleIsRefused) {
  const auto engine = must(TransferEngine::create(config("engine", "nvlink")), "create");
  const Segment segment(first_, {1, 1}, {true}, 1);
  const Result<RegionId> region = engine->register_memory(segment.data() + 4096, segment.bytes);
  ASSERT_FALSE(region.ok());
  EXPECT_EQ(region.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(region.error().message.find("nothing is mapped"), std::string::npos) << region.error().message;
}

TEST_F(CudaVmm, WhatIsDeregisteredIsUnmappedByThePeers) {
  const Segment here(first_, {1});
  const Segment there(second_, {1, 2});
  const std::optional<int> before = mapped_pieces();
  End a(1);
  End b(2);
  a.add(here, 0, here.bytes);
  b.add(there, 0, there.bytes);
  connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  ASSERT_EQ(post(a, kLinkOfA, b, {.work = 1, .page_bytes = kPage, .from = {0}, .to = {there.granule()}}), Posted::kYes);
  run_until(both, [&] { return a.record().succeeded(1); });
  const uint64_t old = b.rkey;
  run_until(both, [&] { return b.domain->deregister_region(old); });
  ASSERT_EQ(post(a, kLinkOfA, b, {.work = 2, .page_bytes = kPage, .from = {0}, .to = {0}}), Posted::kYes);
  run_until(both, [&] { return a.record().completed.contains(2); });
  EXPECT_EQ(a.record().failure(2), ErrorCode::kUnknownRegion);
  run_idle(both);
  if (before) {
    EXPECT_EQ(*mapped_pieces(), *before + 1) << "b's mapping of a's memory is what is left";
  }

  b.add(there, 4096, there.bytes - 4096);
  here.put(0, random_bytes(kPage, 5));
  ASSERT_EQ(post(a, kLinkOfA, b, {.work = 3, .page_bytes = kPage, .from = {0}, .to = {there.granule()}}), Posted::kYes);
  run_until(both, [&] { return a.record().succeeded(3); });
  EXPECT_EQ(there.get(4096 + there.granule(), kPage), here.get(0, kPage));
  ASSERT_EQ(
      post(a, kLinkOfA, b, {.work = 4, .page_bytes = kPage, .from = {0}, .to = {0}, .counted = false, .rkey = old}),
      Posted::kYes);
  run_until(both, [&] { return a.record().completed.contains(4); });
  EXPECT_EQ(a.record().failure(4), ErrorCode::kUnknownRegion);
}

TEST_F(CudaVmm, NothingIsUnmappedThatACopyUnderWayWritesTo) {
  // Many more batches than launches in flight, because each batch has pages of a different length.
  constexpr size_t kBatches = 4 * cuda::kLaunches;
  const Segment here(first_, {2});
  const Segment there(second_, {1, 1});
  End a(1);
  End b(2);
  a.add(here, 0, here.bytes);
  b.add(there, 0, there.bytes);
  connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  size_t posted = 0;
  for (int round = 0; round < 20; ++round) {
    const size_t before = posted;
    while (posted < before + kBatches) {
      const size_t index = posted - before;
      const uint64_t at = index * (there.bytes / kBatches);
      const Batch batch{.work = ++posted, .page_bytes = kPage + 16 * index, .from = {at}, .to = {at}, .counted = false};
      ASSERT_EQ(post(a, kLinkOfA, b, batch), Posted::kYes);
    }
    // During the copies, the peer reports that the region is gone, and the report arrives.
    run_until(both, [&] { return a.record().completed.size() > before; });
    run_until(both, [&] { return b.domain->deregister_region(b.rkey) && a.record().completed.size() == posted; });
    EXPECT_EQ(a.record().failure(posted), ErrorCode::kUnknownRegion) << "the batches were over before the region was";
    b.add(there, 0, there.bytes);
  }
  EXPECT_TRUE(a.record().down.empty());
}

TEST_F(CudaVmm, ASlowGpuHoldsUpBothFences) {
  if (!HeldCopies::possible())
    GTEST_SKIP() << "needs the stand-in CUDA driver, because a real driver cannot hold copies back";
  const Segment here(first_, {1});
  const Segment there(second_, {1});
  End a(1);
  End b(2);
  a.add(here, 0, here.bytes);
  b.add(there, 0, there.bytes);
  connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  const std::vector<std::byte> source = random_bytes(kPage, 3);
  here.put(0, source);
  {
    const HeldCopies held;
    ASSERT_EQ(post(a, kLinkOfA, b, {.work = 1, .page_bytes = kPage, .from = {0}, .to = {0}}), Posted::kYes);
    run_until(both, [&] { return held.count() == 1; });
    for (int turn = 0; turn < 10; ++turn) {
      EXPECT_FALSE(a.domain->fence(kLinkOfA)) << "a copy still reads the source";
      EXPECT_FALSE(b.domain->fence(kLinkOfB)) << "a copy may still land";
      EXPECT_FALSE(b.domain->deregister_region(b.rkey));
      for (Driven* domain : both) domain->poll();
    }
    EXPECT_FALSE(a.record().completed.contains(1));
  }
  run_until(both, [&] { return b.domain->fence(kLinkOfB); });
  EXPECT_TRUE(there.get(0, kPage) == source) << "through means landed";
  run_until(both, [&] { return a.domain->fence(kLinkOfA); });
  EXPECT_EQ(a.record().failure(1), ErrorCode::kPeerDown);
  run_until(both, [&] { return b.domain->deregister_region(b.rkey); });
  // The GPU still works.
  b.add(there, 0, there.bytes);
  connect(*a.domain, *b.domain, 31, 32);
  ASSERT_EQ(post(a, 31, b, {.work = 2, .page_bytes = kPage, .from = {0}, .to = {0}}), Posted::kYes);
  run_until(both, [&] { return a.record().succeeded(2); });
}

TEST_F(CudaVmm, ABatchThatWaitsForPiecesEndsWithItsRegionAndWithItsLink) {
  const Segment here(first_, {1});
  const Segment there(second_, {1, 1});
  for (const char* how : {"the region", "the link", "the peer"}) {
    SCOPED_TRACE(how);
    End a(1);
    End b(2);
    a.add(here, 0, here.bytes);
    b.add(there, 0, 4096);
    connect(*a.domain, *b.domain);
    run_idle({a.domain.get(), b.domain.get()});
    b.add(there, 0, there.bytes);
    // b has no turn in which it could send the pieces.
    ASSERT_EQ(post(a, kLinkOfA, b, {.work = 1, .page_bytes = kPage, .from = {0}, .to = {0}}), Posted::kYes);
    run_idle({a.domain.get()});
    ASSERT_FALSE(a.record().completed.contains(1));
    EXPECT_TRUE(a.domain->prepare_sleep()) << "nothing to do but to wait";
    if (how == std::string("the region")) {
      EXPECT_FALSE(b.domain->deregister_region(b.rkey)) << "a has not said that it is not mapped there";
    } else if (how == std::string("the link")) {
      fence(*a.domain, kLinkOfA);
    } else {
      b.domain.reset();
    }
    run_until({a.domain.get()}, [&] { return a.record().completed.contains(1); });
    EXPECT_EQ(a.record().failure(1),
              how == std::string("the region") ? ErrorCode::kUnknownRegion : ErrorCode::kPeerDown);
    if (how == std::string("the region")) {
      run_until({a.domain.get(), b.domain.get()}, [&] { return b.domain->deregister_region(b.rkey); });
    }
  }
}

TEST_F(CudaVmm, MemoryThatCannotBeMappedFailsTheLinksSetUp) {
  if (!fail_imports(false))
    GTEST_SKIP() << "needs the stand-in CUDA driver, because a real driver cannot be made to fail";
  const Segment here(first_, {1});
  const Segment there(second_, {1, 1});
  End a(1);
  End b(2);
  a.add(here, 0, here.bytes);
  b.add(there, 0, there.bytes);
  fail_imports(true);
  const Bytes offer = must(a.domain->offer(kLinkOfA), "offer");
  const Bytes answer = must(b.domain->accept(kLinkOfB, offer), "accept");
  const Status completed = a.domain->complete(kLinkOfA, answer);
  ASSERT_FALSE(completed.ok());
  EXPECT_EQ(completed.error().code, ErrorCode::kRefused);
  EXPECT_NE(completed.error().message.find("need another lane"), std::string::npos) << completed.error().message;
  run_until({a.domain.get(), b.domain.get()}, [&] { return b.record().down.size() == 1; });
  fence(*b.domain, kLinkOfB);

  // The offerer's memory arrives after the answer.
  fail_imports(false);
  connect(*a.domain, *b.domain, kLinkOfA + 100, kLinkOfB + 100);
  fail_imports(true);
  run_until({a.domain.get(), b.domain.get()}, [&] { return b.record().down.size() == 2; });
  EXPECT_EQ(b.record().down.back().link, kLinkOfB + 100);
  EXPECT_EQ(b.record().down.back().error.code, ErrorCode::kRefused);
}

TEST_F(CudaVmm, LaterMemoryThatCannotBeMappedFailsItsBatchesAlone) {
  if (!fail_imports(false))
    GTEST_SKIP() << "needs the stand-in CUDA driver, because a real driver cannot be made to fail";
  const Segment here(first_, {1});
  const Segment there(second_, {1, 1});
  End a(1);
  End b(2);
  a.add(here, 0, here.bytes);
  b.add(there, 0, 4096);
  const uint64_t good = b.rkey;
  connect(*a.domain, *b.domain);
  const std::vector<Driven*> both = {a.domain.get(), b.domain.get()};
  run_idle(both);
  fail_imports(true);
  b.add(there, 0, there.bytes);
  ASSERT_EQ(post(a, kLinkOfA, b, {.work = 1, .page_bytes = kPage, .from = {0}, .to = {0}}), Posted::kYes);
  ASSERT_EQ(post(a, kLinkOfA, b, {.work = 2, .page_bytes = 4096, .from = {0}, .to = {0}, .rkey = good}), Posted::kYes);
  run_until(both, [&] { return a.record().completed.size() == 2; });
  EXPECT_EQ(a.record().failure(1), ErrorCode::kRefused);
  EXPECT_TRUE(a.record().succeeded(2));
  EXPECT_TRUE(a.record().down.empty());
}

TEST_F(CudaVmm, EnginesOfOneProcessReachEachOthersPieces) {
  const Segment here(first_, {1, 1});
  const Segment there(second_, {1, 1});
  const auto sender = must(TransferEngine::create(config("sender", "nvlink")), "create");
  const auto receiver = must(TransferEngine::create(config("receiver", "nvlink")), "create");
  const RegionId source = must(sender->register_memory(here.data(), here.bytes), "register_memory");
  const RegionId region = must(receiver->register_memory(there.data(), there.bytes), "register_memory");
  const Connection connection = connect(*sender, *receiver);
  const RemoteRegionId target =
      must(sender->import_region(connection.first_to_second, must(receiver->region_descriptor(region))));
  here.put(0, random_bytes(here.bytes, 6));
  const uint64_t border = there.granule() - kPage / 2;
  const TransferId transfer = must(sender->write_one(connection.first_to_second, source, 0, target, border, kPage, {}));
  EXPECT_EQ(ended(*sender, transfer).kind, EventKind::kTransferDone);
  EXPECT_EQ(there.get(border, kPage), here.get(0, kPage));
  auto* const get_access =
      driver_function<int(unsigned long long*, const MemoryLocation*, cuda::DevicePointer)>("cuMemGetAccess");
  for (size_t offset = 0; offset < there.bytes; offset += there.granule()) {
    const MemoryLocation location{.device = first_->device()};
    unsigned long long flags = 0;
    EXPECT_EQ(get_access(&flags, &location, there.address + offset), cuda::kSuccess);
    EXPECT_EQ(flags, 3U) << "the sender's GPU may read and write";
  }
}

// --- Invalid reports of a peer

class CudaVmmPeer : public CudaVmm {
 protected:
  using State = nvlink::PeerRegion::State;
  static constexpr uint32_t kPlace = 5;
  static constexpr uint64_t kKey = (uint64_t{9} << 32) + kPlace;

  // The peer's board has one region with this many bytes of pieces.
  void SetUp() override {
    CudaVmm::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    segment_.emplace(first_, std::vector<size_t>{1, 1, 1});
    peer_ = std::make_unique<nvlink::PeerRegions>(std::make_shared<nvlink::PeerMemory>(first_), false);
    nvlink::RegionEntry& entry = board_->regions[kPlace];
    entry.pieces_bytes.store(2 * segment_->granule());
    entry.rkey.store(kKey);
    board_->places.store(kPlace + 1);
  }
  void TearDown() override {
    if (peer_ != nullptr) peer_->take_all();
    CudaVmm::TearDown();
  }
  UniqueFd piece(size_t index) {
    return must(cuda::export_piece(*driver_, segment_->address + index * segment_->granule()), "export");
  }
  bool hear(uint64_t bytes, UniqueFd descriptor, uint32_t place = kPlace, uint64_t key = kKey - kPlace) {
    return peer_->hear({.kind = same_host::MessageKind::kMemory, .memory = place, .bytes = bytes, .key = key + place},
                       std::move(descriptor), *board_, control_);
  }
  bool hear_piece(size_t index) { return hear(segment_->granule(), piece(index)); }
  // Null: no piece of it has arrived.
  const nvlink::PeerRegion* find() { return peer_->find(kKey, board_->regions[kPlace], control_); }
  bool forget(uint32_t place) { return peer_->forget({.kind = same_host::MessageKind::kForget, .memory = place}, 0); }
  bool advance() {
    return peer_->advance(told_, control_, [](uint64_t) { return true; });
  }

  std::optional<Segment> segment_;
  std::unique_ptr<nvlink::Board> board_ = std::make_unique<nvlink::Board>();
  ManualControl control_;
  std::unique_ptr<nvlink::PeerRegions> peer_;
  nvlink::AccountWords told_{};
};

TEST_F(CudaVmmPeer, ADescriptorAndASizeBelongTogether) {
  EXPECT_FALSE(hear(segment_->granule(), UniqueFd{}));
  EXPECT_FALSE(hear(0, piece(0)));
  EXPECT_FALSE(hear(segment_->granule(), piece(0), kPlace + 1)) << "no such place";
  EXPECT_FALSE(hear(segment_->granule(), piece(0), nvlink::kMaxRegions));
  EXPECT_FALSE(forget(nvlink::kMaxRegions));
  EXPECT_EQ(find(), nullptr);
}

TEST_F(CudaVmmPeer, MorePiecesAtATimeThanAgreedOnAreRefused) {
  board_->regions[kPlace].pieces_bytes.store(100 * segment_->granule());
  for (uint32_t i = 0; i < nvlink::kUntakenPieces; ++i) EXPECT_TRUE(hear_piece(0));
  EXPECT_FALSE(hear_piece(0));
  control_.work();
  EXPECT_TRUE(advance());
  EXPECT_EQ(told_.pieces_taken.load(), nvlink::kUntakenPieces);
  EXPECT_TRUE(hear_piece(0));
}

TEST_F(CudaVmmPeer, MorePiecesThanTheRegionHasAreRefused) {
  const std::optional<int> before = mapped_pieces();
  ASSERT_TRUE(hear_piece(0));
  control_.work();
  EXPECT_EQ(find()->state(), State::kComing);
  ASSERT_TRUE(hear_piece(1));
  EXPECT_EQ(find()->state(), State::kComing) << "the control thread has not come to it";
  control_.work();
  EXPECT_EQ(find()->state(), State::kReady);
  if (before) {
    EXPECT_EQ(*mapped_pieces(), *before + 2);
  }
  EXPECT_FALSE(hear_piece(2));
}

TEST_F(CudaVmmPeer, PiecesOfARegionThatIsGoneAreDropped) {
  board_->regions[kPlace].rkey.store(0);
  ASSERT_TRUE(hear_piece(0));
  EXPECT_EQ(find(), nullptr);
  EXPECT_TRUE(advance());
  EXPECT_EQ(told_.pieces_taken.load(), 1U);
}

TEST_F(CudaVmmPeer, PiecesOfTheRegionThatHadItsPlaceAreNotTakenForItsOwn) {
  const uint64_t old = kKey - kPlace - (uint64_t{1} << 32);
  ASSERT_TRUE(hear(segment_->granule(), piece(0), kPlace, old));
  EXPECT_EQ(find(), nullptr);
  ASSERT_TRUE(forget(kPlace));
  ASSERT_TRUE(hear_piece(1));
  EXPECT_FALSE(hear(segment_->granule(), piece(0), kPlace, old)) << "it was forgotten";
}

TEST_F(CudaVmmPeer, ARegionWhosePlaceIsStillTheOneBeforeItsWaits) {
  const uint64_t later = kKey + (uint64_t{1} << 32);
  ASSERT_TRUE(hear_piece(0));
  board_->regions[kPlace].rkey.store(later);
  EXPECT_EQ(peer_->find(later, board_->regions[kPlace], control_), nullptr);
  EXPECT_TRUE(peer_->awaits(later));
}

TEST_F(CudaVmmPeer, WhatIsNoMemoryOrOfAnotherSizeFailsTheRegion) {
  for (const bool wrong_size : {false, true}) {
    UniqueFd descriptor = wrong_size ? piece(0) : UniqueFd(open("/dev/null", O_RDWR | O_CLOEXEC));
    ASSERT_TRUE(hear((wrong_size ? 2 : 1) * segment_->granule(), std::move(descriptor)));
    EXPECT_EQ(peer_->useless(), nullptr) << "nobody knows yet";
    control_.work();
    ASSERT_EQ(find()->state(), State::kFailed);
    EXPECT_EQ(find()->error().code, ErrorCode::kRefused);
    ASSERT_NE(peer_->useless(), nullptr);
    ASSERT_TRUE(forget(kPlace));
    EXPECT_TRUE(advance());
    control_.work();
  }
}

TEST_F(CudaVmmPeer, ARegionOfImpossibleSizeFails) {
  board_->regions[kPlace].pieces_bytes.store(UINT64_MAX);
  ASSERT_TRUE(hear_piece(0));
  control_.work();
  EXPECT_EQ(find()->state(), State::kFailed);
}

TEST_F(CudaVmmPeer, ARegionLargerThanItsPiecesFails) {
  board_->regions[kPlace].offset.store(segment_->granule());
  board_->regions[kPlace].length.store(segment_->granule() + 1);
  ASSERT_TRUE(hear_piece(0));
  ASSERT_TRUE(hear_piece(1));
  control_.work();
  ASSERT_EQ(find()->state(), State::kFailed);
  EXPECT_EQ(find()->error().code, ErrorCode::kOutOfRange);
}

TEST_F(CudaVmmPeer, APeerThatCannotExportReportsIt) {
  ASSERT_TRUE(hear_piece(0));
  ASSERT_TRUE(hear(0, UniqueFd{}));
  control_.work();
  ASSERT_EQ(find()->state(), State::kFailed);
  EXPECT_NE(find()->error().message.find("could not export"), std::string::npos);
  EXPECT_EQ(peer_->useless(), nullptr) << "some of it could be mapped";
}

TEST_F(CudaVmmPeer, AForgottenRegionIsUnmappedBeforeThePeerIsNotified) {
  const std::optional<int> before = mapped_pieces();
  for (size_t i = 0; i < 2; ++i) ASSERT_TRUE(hear_piece(i));
  control_.work();
  ASSERT_TRUE(forget(kPlace));
  ASSERT_TRUE(forget(0)) << "nothing of it was mapped";
  bool settled = false;
  peer_->advance(told_, control_, [&](uint64_t) { return settled; });
  control_.work();
  EXPECT_FALSE(peer_->advance(told_, control_, [&](uint64_t) { return settled; })) << "copies are under way";
  EXPECT_EQ(told_.let_go.load(), 0U);
  settled = true;
  peer_->advance(told_, control_, [&](uint64_t) { return settled; });
  EXPECT_EQ(told_.let_go.load(), 0U) << "the control thread has not come to it";
  control_.work();
  if (before) {
    EXPECT_EQ(mapped_pieces(), before);
  }
  EXPECT_TRUE(advance());
  EXPECT_EQ(told_.let_go.load(), 2U);
}

}  // namespace
}  // namespace kvc::test::cuda_vmm
