// The bounce lane over tcp. Either side has GPU memory (a GPU's, or its stand-in's) or host memory, and copies it through
// host memory. engine_test.cc runs whole transfer engines over this lane.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/byte_codec.h"
#include "lane/immediate.h"
#include "providers/bounce/wire.h"
#include "tests/cuda_test_support.h"
#include "tests/domain_test_support.h"
#include "tests/rig.h"

namespace kvc::bounce {
namespace {

using test::GpuBuffer;
using test::kLinkOfA;
using test::kLinkOfB;
using test::must;
using test::run_until;

constexpr uint64_t kBytes = 8 << 20;

enum class Where : uint8_t { kHost, kGpu };

// Bytes in host memory or in GPU memory.
class Memory {
 public:
  Memory(const std::shared_ptr<cuda::Context>& gpu, uint64_t bytes) {
    if (gpu != nullptr) {
      gpu_.emplace(gpu, bytes);
    } else {
      host_ = std::make_unique<std::vector<std::byte>>(bytes);
    }
  }
  std::byte* data() const { return gpu_ ? gpu_->data() : host_->data(); }
  uint64_t size() const { return gpu_ ? gpu_->bytes : host_->size(); }
  void put(const std::vector<std::byte>& bytes) {
    if (gpu_) {
      gpu_->put(bytes);
    } else {
      *host_ = bytes;
    }
  }
  std::vector<std::byte> get() const { return gpu_ ? gpu_->get() : *host_; }

 private:
  std::optional<GpuBuffer> gpu_;
  std::unique_ptr<std::vector<std::byte>> host_;
};

struct End {
  explicit End(const std::shared_ptr<cuda::Context>& gpu, const std::string& provider = "bounce",
               const std::string& device = "")
      : memory(gpu, kBytes) {
    DomainConfig config;
    config.provider = provider;
    config.device = device;
    domain = std::make_unique<test::Driven>([&](ControlQueue& control) { return open_domain(config, control); });
    rkey = must(domain->register_region(memory.data(), memory.size()));
  }
  test::Record& record() const { return domain->record; }
  Memory memory;  // outlives the domain
  std::unique_ptr<test::Driven> domain;
  uint64_t rkey = 0;
};

class Bounce : public test::Cuda {
 protected:
  std::shared_ptr<cuda::Context> gpu(Where where, const std::shared_ptr<cuda::Context>& context) const {
    return where == Where::kGpu ? context : nullptr;
  }
  std::vector<std::byte> bytes(uint64_t seed) const {
    std::vector<std::byte> data(kBytes);
    test::fill_random(data.data(), data.size(), seed);
    return data;
  }
};

// `count` pages at every second position. The source uses the opposite end of its memory.
test::Batch batch_of(WorkId work, size_t count, uint64_t page_bytes, uint64_t shift = 0) {
  test::Batch batch{.work = work, .page_bytes = page_bytes};
  for (size_t i = 0; i < count; ++i) {
    batch.from.push_back(shift + (count - 1 - i) * page_bytes);
    batch.to.push_back(shift + 2 * i * page_bytes);
  }
  return batch;
}

// Posts batches of 128 KiB with separate pages. 16 batches are twice the number of slots.
void post_many(End& from, LinkId link, const End& to, WorkId first, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    ASSERT_EQ(test::post(from, link, to, batch_of(first + i, 64, 2048, i * 2 * 64 * 2048)), Posted::kYes);
  }
}

class BounceBetween : public Bounce, public testing::WithParamInterface<std::pair<Where, Where>> {};

TEST_P(BounceBetween, PagesOfAnyLengthLandAndAreCountedWhenTheyAreThere) {
  End a(gpu(GetParam().first, first_));
  End b(gpu(GetParam().second, second_));
  test::connect(*a.domain, *b.domain);
  const std::vector<std::byte> source = bytes(1);
  a.memory.put(source);
  std::vector<std::byte> expected = bytes(2);
  b.memory.put(expected);
  struct Shape {
    size_t pages;
    uint64_t page;
    uint64_t shift;
  };
  WorkId work = 0;
  for (const Shape& shape :
       {Shape{64, 16384, 0}, Shape{40, 65536, 0}, Shape{3, 1536 << 10, 0}, Shape{1, 5 << 20, 0},
        Shape{1, kSlotBytes, 0}, Shape{1, kSlotBytes + 16, 0}, Shape{7, 1000, 3}, Shape{1, 1, 9}}) {
    const test::Batch batch = batch_of(++work, shape.pages, shape.page, shape.shift);
    for (size_t i = 0; i < shape.pages; ++i) {
      std::memcpy(expected.data() + batch.to[i], source.data() + batch.from[i], shape.page);
    }
    b.record().counted = 0;
    bool early = false;
    b.domain->on_completion = [&](const Completion&) {
      early |= b.record().counted == shape.pages && !test::same(b.memory.get(), expected);
    };
    ASSERT_EQ(test::post(a, kLinkOfA, b, batch), Posted::kYes);
    run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().completed.contains(work); }, "the batch");
    EXPECT_TRUE(a.record().succeeded(work));
    EXPECT_EQ(b.record().counted, shape.pages);
    EXPECT_FALSE(early) << "counted before the pages were there";
    EXPECT_TRUE(test::same(b.memory.get(), expected)) << shape.pages << " pages of " << shape.page;
  }
}

TEST_P(BounceBetween, BothEndsWriteAtOnceThroughFewerSlotsThanBatches) {
  End a(gpu(GetParam().first, first_));
  End b(gpu(GetParam().second, second_));
  test::connect(*a.domain, *b.domain);
  const std::vector<std::byte> of_a = bytes(1);
  const std::vector<std::byte> of_b = bytes(2);
  a.memory.put(of_a);
  b.memory.put(of_b);
  // Each upper half is written to the lower half of the other memory, 128 KiB at a time: four times as many batches as
  // slots.
  constexpr uint64_t kHalf = kBytes / 2;
  constexpr uint64_t kPage = 2048;
  constexpr size_t kBatches = kHalf / (64 * kPage);
  size_t posted_a = 0;
  size_t posted_b = 0;
  const auto post = [&](End& from, LinkId link, const End& to, size_t& posted) {
    if (posted == kBatches) return;
    test::Batch batch{.work = posted + 1, .page_bytes = kPage};
    for (size_t i = 0; i < 64; ++i) {
      const uint64_t offset = (posted * 64 + i) * kPage;
      batch.from.push_back(kHalf + offset);
      batch.to.push_back(offset);
    }
    if (test::post(from, link, to, batch) == Posted::kYes) ++posted;
  };
  run_until(
      {a.domain.get(), b.domain.get()},
      [&] {
        post(a, kLinkOfA, b, posted_a);
        post(b, kLinkOfB, a, posted_b);
        return a.record().order.size() == kBatches && b.record().order.size() == kBatches;
      },
      "all batches");
  const auto equal = [](const Memory& target, const std::vector<std::byte>& source) {
    const std::vector<std::byte> landed = target.get();
    return std::memcmp(landed.data(), source.data() + kHalf, kHalf) == 0;
  };
  EXPECT_TRUE(equal(b.memory, of_a));
  EXPECT_TRUE(equal(a.memory, of_b));
  EXPECT_EQ(b.record().counted, kBatches * 64);
  EXPECT_EQ(a.record().counted, kBatches * 64);
}

TEST_P(BounceBetween, AFenceEndsWhatIsUnderWayAndNothingLandsAfterIt) {
  End a(gpu(GetParam().first, first_));
  End b(gpu(GetParam().second, second_));
  test::connect(*a.domain, *b.domain);
  a.memory.put(bytes(1));
  post_many(a, kLinkOfA, b, 1, 16);
  run_until({a.domain.get(), b.domain.get()}, [&] { return b.record().counted > 0; }, "the first batch");
  test::fence(*b.domain, kLinkOfB);
  const uint64_t counted = b.record().counted;
  const std::vector<std::byte> landed = b.memory.get();
  run_until({a.domain.get(), b.domain.get()}, [&] { return !a.record().down.empty(); }, "the sender to notice");
  test::fence(*a.domain, kLinkOfA);
  EXPECT_EQ(a.record().completed.size(), 16U);
  size_t succeeded = 0;
  for (const auto& [work, error] : a.record().completed) succeeded += error ? 0 : 1;
  EXPECT_LT(succeeded, 16U);
  EXPECT_GE(counted, succeeded * 64) << "what ended well is counted";
  EXPECT_EQ(b.record().counted, counted);
  EXPECT_TRUE(b.memory.get() == landed);
}

TEST_P(BounceBetween, TheSendersFenceCompletesItsBatches) {
  End a(gpu(GetParam().first, first_));
  End b(gpu(GetParam().second, second_));
  test::connect(*a.domain, *b.domain);
  post_many(a, kLinkOfA, b, 1, 16);
  run_until({a.domain.get(), b.domain.get()}, [&] { return b.record().counted > 0; }, "the first batch");
  test::fence(*a.domain, kLinkOfA);
  EXPECT_EQ(a.record().completed.size(), 16U);
  // All slots are free again, so another link gets them.
  test::fence(*b.domain, kLinkOfB);
  test::connect(*a.domain, *b.domain, 31, 32);
  post_many(a, 31, b, 101, 32);
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().completed.size() == 48; }, "the second link");
  for (WorkId work = 101; work <= 132; ++work) EXPECT_TRUE(a.record().succeeded(work));
}

INSTANTIATE_TEST_SUITE_P(Memory, BounceBetween,
                         testing::Values(std::pair(Where::kGpu, Where::kGpu), std::pair(Where::kGpu, Where::kHost),
                                         std::pair(Where::kHost, Where::kGpu), std::pair(Where::kHost, Where::kHost)),
                         [](const auto& param) {
                           const auto name = [](Where where) { return where == Where::kGpu ? "Gpu" : "Host"; };
                           return std::string(name(param.param.first)) + "To" + name(param.param.second);
                         });

TEST_F(Bounce, ASlowGpuHoldsUpTheFence) {
  if (!test::HeldCopies::possible())
    GTEST_SKIP() << "needs the stand-in CUDA driver, because a real driver cannot hold copies back";
  End host(nullptr);
  End b(second_);
  End c(first_);
  test::connect(*host.domain, *b.domain);
  test::connect(*b.domain, *c.domain, 41, 42);
  const std::vector<test::Driven*> all = {host.domain.get(), b.domain.get(), c.domain.get()};
  const std::vector<std::byte> source = bytes(1);
  host.memory.put(source);
  {
    const test::HeldCopies held;
    // One slot that b's GPU scatters, and one slot that it gathers.
    test::Batch batch{.work = 1, .page_bytes = 4096, .from = {0}, .to = {0}};
    ASSERT_EQ(test::post(host, kLinkOfA, b, batch), Posted::kYes);
    run_until(all, [&] { return held.count() == 1; }, "the slot to arrive");
    batch.from = {65536};
    ASSERT_EQ(test::post(b, 41, c, batch), Posted::kYes);
    run_until(all, [&] { return held.count() == 2; }, "the gathering");
    for (int turn = 0; turn < 10; ++turn) {
      EXPECT_FALSE(b.domain->fence(kLinkOfB)) << "a copy may still land";
      EXPECT_FALSE(b.domain->fence(41)) << "a copy still reads the source";
      EXPECT_FALSE(b.domain->deregister_region(b.rkey));
      for (test::Driven* domain : all) domain->poll();
    }
    EXPECT_FALSE(b.record().completed.contains(1));
  }
  run_until(all, [&] { return b.domain->fence(kLinkOfB); }, "the fence of the receiver");
  run_until(all, [&] { return b.domain->fence(41); }, "the fence of the sender");
  EXPECT_EQ(b.record().failure(1), ErrorCode::kPeerDown);
  EXPECT_EQ(c.record().counted, 0U) << "what is gathered after the fence goes nowhere";
  EXPECT_TRUE(b.domain->deregister_region(b.rkey));
  EXPECT_EQ(std::memcmp(b.memory.get().data(), source.data(), 4096), 0) << "through means landed";
  // All slots are free again.
  b.rkey = must(b.domain->register_region(b.memory.data(), b.memory.size()));
  test::connect(*b.domain, *c.domain, 51, 52);
  post_many(b, 51, c, 101, 32);
  run_until(all, [&] { return b.record().completed.size() == 33; }, "the next link");
  for (WorkId work = 101; work <= 132; ++work) EXPECT_TRUE(b.record().succeeded(work));
}

TEST_F(Bounce, WritesThatLandDuringAFenceAreCountedAndTheirSenderIsNotified) {
  if (!test::HeldCopies::possible())
    GTEST_SKIP() << "needs the stand-in CUDA driver, because a real driver cannot hold copies back";
  End a(nullptr);
  End b(second_);
  test::connect(*a.domain, *b.domain);
  {
    const test::HeldCopies held;
    post_many(a, kLinkOfA, b, 1, 2);
    run_until({a.domain.get(), b.domain.get()}, [&] { return held.count() == 2; }, "both copies");
    EXPECT_FALSE(b.domain->fence(kLinkOfB));
    EXPECT_EQ(b.record().counted, 0U);
  }
  run_until({a.domain.get(), b.domain.get()}, [&] { return b.domain->fence(kLinkOfB); }, "the fence");
  EXPECT_EQ(b.record().counted, 2 * 64U);
  run_until({a.domain.get(), b.domain.get()}, [&] { return !a.record().down.empty(); }, "the sender to notice");
  for (WorkId work = 1; work <= 2; ++work) EXPECT_TRUE(a.record().succeeded(work)) << work;
}

TEST_F(Bounce, TheProcessorCopiesOneSlotATurn) {
  End a(nullptr);
  End b(nullptr);
  test::connect(*a.domain, *b.domain);
  constexpr size_t kPages = kSlotBytes / 65536;
  for (WorkId work = 1; work <= 4; ++work) {
    test::Batch batch = batch_of(work, kPages, 65536);
    for (size_t i = 0; i < kPages; ++i) batch.to[i] = ((work - 1) * kPages + i) * 65536;
    ASSERT_EQ(test::post(a, kLinkOfA, b, batch), Posted::kYes);
  }
  uint64_t most = 0;
  run_until(
      {a.domain.get()},
      [&] {
        const uint64_t before = b.record().counted;
        b.domain->poll();
        most = std::max(most, b.record().counted - before);
        return b.record().counted == 4 * kPages;
      },
      "all of them");
  EXPECT_EQ(most, kPages);
}

TEST_F(Bounce, APeerThatReceivesNothingIsNotWaitedFor) {
  End a(nullptr);
  End b(nullptr);
  test::connect(*a.domain, *b.domain);
  post_many(a, kLinkOfA, b, 1, 1);
  run_until({a.domain.get(), b.domain.get()}, [&] { return b.record().counted == 64; }, "the batch");
  test::fence(*b.domain, kLinkOfB);  // a has no turn meanwhile
  EXPECT_EQ(b.record().counted, 64U);
}

TEST_F(Bounce, AGpuThatBreaksDownTakesTheLinksWithIt) {
  auto* const break_down = test::driver_function<int(int)>("fakeBreak");
  if (break_down == nullptr)
    GTEST_SKIP() << "needs the stand-in CUDA driver, because a real driver cannot be made to fail";
  End a(first_);
  End b(nullptr);
  test::connect(*a.domain, *b.domain);
  post_many(a, kLinkOfA, b, 1, 4);
  break_down(1);
  a.domain->poll();
  run_until({a.domain.get(), b.domain.get()}, [&] { return !a.record().down.empty(); }, "the link's end");
  EXPECT_NE(a.record().down[0].error.message.find("CUDA_ERROR"), std::string::npos) << a.record().down[0].error.message;
  test::fence(*a.domain, kLinkOfA);
  EXPECT_EQ(a.record().completed.size(), 4U);
  break_down(0);
}

TEST_F(Bounce, GpuMemoryMayComeAfterTheLinks) {
  End a(nullptr);
  End b(nullptr);
  test::connect(*a.domain, *b.domain);
  const GpuBuffer source(first_, kBytes);
  const GpuBuffer target(second_, kBytes);
  source.put(bytes(3));
  a.rkey = must(a.domain->register_region(source.data(), source.bytes));
  b.rkey = must(b.domain->register_region(target.data(), target.bytes));
  EXPECT_TRUE(source.is_synchronous()) << "our own stream may read right after a copy";
  const PageWrite page{source.data() + 4096, 8192};
  ASSERT_EQ(a.domain->post(kLinkOfA, {.work = 1,
                                      .rkey = b.rkey,
                                      .target_base = target.address,
                                      .page_bytes = 65536,
                                      .counted = true,
                                      .immediate = test::immediate_of(1),
                                      .pages = {&page, 1}}),
            Posted::kYes);
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().succeeded(1); }, "the page");
  EXPECT_EQ(std::memcmp(target.get().data() + 8192, source.get().data() + 4096, 65536), 0);
  for (End* end : {&a, &b}) EXPECT_TRUE(end->domain->deregister_region(end->rkey));
}

TEST_F(Bounce, NothingOfItIsAConcernOfAStreamCapture) {
  const GpuBuffer source(first_, kBytes);
  const GpuBuffer target(second_, kBytes);
  source.put(bytes(4));
  test::Capturing capture(first_);
  {
    DomainConfig config;
    config.provider = "bounce";
    test::Driven a([&](ControlQueue& control) { return open_domain(config, control); });
    test::Driven b([&](ControlQueue& control) { return open_domain(config, control); });
    const uint64_t from = must(a.register_region(source.data(), source.bytes));
    const uint64_t to = must(b.register_region(target.data(), target.bytes));
    test::connect(a, b);
    std::vector<PageWrite> pages;
    for (size_t i = 0; i < 64; ++i) pages.push_back({source.data() + i * 65536, i * 65536});
    {
      const test::HeldCopies held;
      a.post(kLinkOfA, {.work = 1,
                        .rkey = to,
                        .page_bytes = 65536,
                        .counted = true,
                        .immediate = test::immediate_of(64),
                        .pages = pages});
      for (int turn = 0; turn < 3000; ++turn) a.poll();  // the GPU's health is checked in these turns
    }
    run_until({&a, &b}, [&] { return a.record.completed.contains(1); }, "the batch");
    EXPECT_TRUE(a.record.succeeded(1));
    run_until({&a, &b}, [&] { return a.fence(kLinkOfA); }, "the fence");
    test::fence(b, kLinkOfB);
    EXPECT_TRUE(a.deregister_region(from));
    EXPECT_TRUE(b.deregister_region(to));
  }
  EXPECT_EQ(capture.end(), cuda::kSuccess);
}

TEST_F(Bounce, AnImmediateAloneCountsForAsManyPages) {
  End a(first_);
  End b(second_);
  test::connect(*a.domain, *b.domain);
  const std::vector<PageWrite> none(5);
  const WriteBatch batch{.work = 1, .counted = true, .immediate = test::immediate_of(5), .pages = none};
  ASSERT_EQ(a.domain->post(kLinkOfA, batch), Posted::kYes);
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().completed.contains(1); }, "the immediate");
  EXPECT_TRUE(a.record().succeeded(1));
  EXPECT_EQ(b.record().counted, 5U);
}

TEST_F(Bounce, AWrongKeyOrPlaceCostsItsBatchOnly) {
  End a(first_);
  End b(second_);
  test::connect(*a.domain, *b.domain);
  test::Batch unknown = batch_of(1, 4, 4096);
  unknown.rkey = b.rkey + 1;
  test::Batch outside = batch_of(2, 4, 4096);
  outside.to[2] = kBytes - 4095;
  test::Batch far_outside = batch_of(3, 1, 4 << 20);  // larger than a slot: in pieces
  far_outside.to[0] = kBytes - (2 << 20);
  for (const test::Batch& batch : {unknown, outside, far_outside, batch_of(4, 4, 4096)}) {
    ASSERT_EQ(test::post(a, kLinkOfA, b, batch), Posted::kYes);
  }
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().completed.size() == 4; }, "all four");
  EXPECT_EQ(a.record().failure(1), ErrorCode::kUnknownRegion);
  EXPECT_EQ(a.record().failure(2), ErrorCode::kOutOfRange);
  EXPECT_EQ(a.record().failure(3), ErrorCode::kOutOfRange);
  EXPECT_TRUE(a.record().succeeded(4));
  EXPECT_EQ(b.record().counted, 4U);
  EXPECT_TRUE(a.record().down.empty() && b.record().down.empty());

  EXPECT_TRUE(b.domain->deregister_region(b.rkey));
  ASSERT_EQ(test::post(a, kLinkOfA, b, batch_of(5, 4, 4096)), Posted::kYes);
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().completed.size() == 5; }, "the revoked");
  EXPECT_EQ(a.record().failure(5), ErrorCode::kUnknownRegion);
}

TEST_F(Bounce, MessagesPass) {
  End a(first_);
  End b(second_);
  test::connect(*a.domain, *b.domain);
  const std::byte message[] = {std::byte{4}, std::byte{2}};
  ASSERT_EQ(a.domain->send(kLinkOfA, 9, message), Posted::kYes);
  run_until(
      {a.domain.get(), b.domain.get()},
      [&] { return b.record().messages.size() == 1 && a.record().completed.contains(9); }, "the message");
  EXPECT_TRUE(a.record().succeeded(9));
  EXPECT_EQ(b.record().messages[0].first, kLinkOfB);
  EXPECT_EQ(b.record().messages[0].second, Bytes({std::byte{4}, std::byte{2}}));
}

// A peer that follows tcp and the handshake, and then writes arbitrary bytes into the slots.
struct Rogue {
  Rogue(End& victim, const std::shared_ptr<cuda::Context>& none) : tcp(none, "tcp") {
    ByteReader reader(offer = must(victim.domain->offer(kLinkOfB)));
    reader.number<uint32_t>();
    reader.number<uint32_t>();
    slots = reader.number<uint64_t>();
    base = reader.number<uint64_t>();
    const auto below = reader.blob(1 << 16);
    const Bytes answer = must(tcp.domain->accept(kLinkOfA, below));
    ByteWriter writer;
    writer.number(kMagic);
    writer.number(kVersion);
    writer.number(tcp.rkey);
    writer.number(reinterpret_cast<uint64_t>(tcp.memory.data()));
    writer.blob(answer);
    must(victim.domain->complete(kLinkOfB, writer.take()));
  }
  void write(const SlotHeader& header, uint32_t note) {
    std::memcpy(tcp.memory.data(), &header, sizeof(header));
    const PageWrite page{tcp.memory.data(), 0};
    ASSERT_EQ(tcp.domain->post(kLinkOfA, {.work = ++work,
                                          .rkey = slots,
                                          .target_base = base,
                                          .page_bytes = kHeaderBytes,
                                          .counted = true,
                                          .immediate = note,
                                          .pages = {&page, 1}}),
              Posted::kYes);
  }
  End tcp;
  Bytes offer;
  uint64_t slots = 0;
  uint64_t base = 0;
  WorkId work = 0;
};

TEST_F(Bounce, APeerThatWritesNonsenseCostsItsLinkOnly) {
  const uint32_t full = Note{}.encode();
  const uint32_t one = Immediate{1, 0, 1}.encode();
  struct Case {
    SlotHeader header;
    uint32_t note;
    const char* said;
  };
  const Case cases[] = {
      {{.piece_bytes = 4096, .pieces = 0}, full, "malformed"},
      {{.piece_bytes = 4096, .pieces = 65}, full, "malformed"},
      {{.piece_bytes = kSlotBytes, .pieces = 2}, full, "malformed"},
      {{.piece_bytes = UINT64_MAX / 2, .pieces = 2}, full, "malformed"},
      {{.piece_bytes = 16, .pieces = 2, .immediate = one, .counted = 1}, full, "malformed"},
      {{}, Note{.emptied = true, .slot = 3}.encode(), "not filled"},
      {{}, Immediate{200, 0, 1}.encode(), "note of an unknown kind"},
  };
  End b(second_);
  for (const Case& one_case : cases) {
    Rogue rogue(b, nullptr);
    b.record().down.clear();
    rogue.write(one_case.header, one_case.note);
    run_until({rogue.tcp.domain.get(), b.domain.get()}, [&] { return !b.record().down.empty(); }, one_case.said);
    EXPECT_EQ(b.record().down[0].error.code, ErrorCode::kPeerDown);
    EXPECT_NE(b.record().down[0].error.message.find(one_case.said), std::string::npos)
        << b.record().down[0].error.message;
    test::fence(*b.domain, kLinkOfB);
  }
  EXPECT_EQ(b.record().counted, 0U);
  End a(first_);
  test::connect(*a.domain, *b.domain);
  ASSERT_EQ(test::post(a, kLinkOfA, b, batch_of(1, 4, 4096)), Posted::kYes);
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().succeeded(1); }, "an honest peer");
}

TEST_F(Bounce, MalformedHandshakesAreRefused) {
  End a(first_);
  End b(second_);
  const Bytes offer = must(a.domain->offer(kLinkOfA));
  for (size_t cut : {size_t{0}, size_t{4}, size_t{20}, offer.size() - 1}) {
    const auto answer = b.domain->accept(kLinkOfB, std::span(offer).first(cut));
    ASSERT_FALSE(answer.ok());
    EXPECT_EQ(answer.error().provider, "bounce");
  }
  Bytes other = offer;
  other[4] = std::byte{9};
  const auto answer = b.domain->accept(kLinkOfB, other);
  ASSERT_FALSE(answer.ok());
  EXPECT_NE(answer.error().message.find("run one release on both sides"), std::string::npos);
}

TEST_F(Bounce, LanesBelowThatMoveNoHostMemoryAreRefused) {
  test::ManualControl control;
  DomainConfig config;
  config.provider = "bounce";
  for (const char* device : {"bounce", "nvlink", "nothing"}) {
    config.device = device;
    const auto domain = open_domain(config, control);
    ASSERT_FALSE(domain.ok());
    EXPECT_EQ(domain.error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(domain.error().provider, "bounce");
  }
}

TEST_F(Bounce, OneDomainServesOneGpu) {
  if (first_->device() == second_->device()) GTEST_SKIP() << "needs two GPUs";
  End a(first_);
  const GpuBuffer there(second_, 4096);
  const auto region = a.domain->register_region(there.data(), there.bytes);
  ASSERT_FALSE(region.ok());
  EXPECT_NE(region.error().message.find("one engine serves one GPU"), std::string::npos);
}

TEST_F(Bounce, LanesOfHostMemoryRefuseAGpusAndNameThisOne) {
  const GpuBuffer memory(first_, 4096);
  for (const char* provider : {"tcp", "host"}) {
    DomainConfig config;
    config.provider = provider;
    test::Driven domain([&](ControlQueue& control) { return open_domain(config, control); });
    const auto region = domain.register_region(memory.data(), memory.bytes);
    ASSERT_FALSE(region.ok()) << provider;
    EXPECT_EQ(region.error().code, ErrorCode::kNotReachable);
    EXPECT_NE(region.error().message.find("bounce"), std::string::npos) << region.error().message;
  }
}

}  // namespace
}  // namespace kvc::bounce
