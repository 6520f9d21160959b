#include "engine/request.h"

#include <gtest/gtest.h>

#include <array>

#include "engine/message.h"

namespace kvc {
namespace {

struct Fixture {
  std::vector<std::byte> memory = std::vector<std::byte>(1000);
  std::shared_ptr<LocalRegion> source;
  std::shared_ptr<const RemoteRegion> target =
      std::make_shared<const RemoteRegion>(1, 1, 0, 0, 0, std::vector<uint64_t>{});
  Fixture() {
    const MemoryRange range{memory.data(), memory.size()};
    source = std::make_shared<LocalRegion>(1, range.base, range.bytes, std::make_shared<LocalMemory>(range));
  }
  RequestRef table(std::vector<int64_t> from, std::vector<int64_t> to, uint64_t source_offset, uint64_t target_offset) {
    auto pages = std::make_shared<const PageTable>(PageTable{{std::move(from), 10, 1}, {std::move(to), 100, 2}});
    return Request::make(source, target, 8, 5, TableWrite{std::move(pages), source_offset, target_offset});
  }
};

constexpr uint64_t kNoLimit = UINT64_MAX;

TEST(Request, ASingleWriteIsOnePageOfAnySize) {
  Fixture f;
  Request request(f.source, f.target, 900, 7, SingleWrite{50, 60});
  std::array<PageWrite, 64> pages;
  ASSERT_FALSE(request.done());
  const Request::Batch batch = request.batch(0, pages, 100);  // larger than the limit, but complete
  EXPECT_EQ(batch.steps, 1U);
  EXPECT_EQ(batch.pages, 1U);
  EXPECT_EQ(batch.page_bytes, 900U);
  EXPECT_EQ(batch.source, f.source->memory.get());
  EXPECT_EQ(batch.target, f.target.get());
  EXPECT_EQ(pages[0].source, f.memory.data() + 50);
  EXPECT_EQ(pages[0].target_offset, 60U);
  EXPECT_TRUE(request.counted());
  request.advance(batch.steps);
  EXPECT_TRUE(request.done());
}

TEST(Request, ASplitWriteComesInUncountedPartsAndCountsOnceAtItsEnd) {
  Fixture f;
  Request request(f.source, f.target, 900, 7, SingleWrite{50, 60});
  ASSERT_EQ(request.splittable(), 900U);
  request.split(400);
  EXPECT_EQ(request.splittable(), 0U);
  EXPECT_TRUE(request.in_parts());
  EXPECT_FALSE(request.counted());
  EXPECT_EQ(request.pages_at_end(), 1U);
  std::array<PageWrite, 64> pages;
  uint64_t offset = 0;
  for (const uint64_t bytes : {400, 400, 100}) {
    const Request::Batch batch = request.batch(request.position(), pages, kNoLimit);
    EXPECT_EQ(batch.pages, 1U);
    EXPECT_EQ(batch.page_bytes, bytes);
    EXPECT_EQ(pages[0].source, f.memory.data() + 50 + offset);
    EXPECT_EQ(pages[0].target_offset, 60 + offset);
    offset += bytes;
    request.advance(batch.steps);
  }
  EXPECT_TRUE(request.done());
}

TEST(Request, APinnedWriteKeepsItsDomainWhenSplit) {
  Fixture f;
  Request request(f.source, f.target, 900, 7, SingleWrite{50, 60, 1});
  EXPECT_EQ(request.splittable(), 900U);
  request.split(400);
  EXPECT_EQ(request.splittable(), 0U);
  EXPECT_EQ(request.domain(), 1U);
}

TEST(Request, AnImmediateAloneHasNoBytesAndNoRegions) {
  Request request(nullptr, nullptr, 0, 7, ImmediateOnly{70});
  std::array<PageWrite, 64> pages;
  Request::Batch batch = request.batch(0, pages, 1);
  EXPECT_EQ(batch.pages, 64U);
  EXPECT_EQ(batch.bytes(), 0U);
  EXPECT_EQ(batch.source, nullptr);
  request.advance(batch.steps);
  batch = request.batch(request.position(), pages, 1);
  EXPECT_EQ(batch.pages, 6U);
  request.advance(batch.steps);
  EXPECT_TRUE(request.done());
}

TEST(Request, AMessageIsNumberedOnce) {
  Request request(nullptr, nullptr, 0, std::nullopt, MessageWrite{Bytes(kUserHeaderBytes + 3, std::byte{9})});
  ASSERT_TRUE(request.needs_number());
  request.number(0x01020304);
  EXPECT_FALSE(request.needs_number());
  std::array<PageWrite, 64> pages;
  const Request::Batch batch = request.batch(0, pages, 1);
  EXPECT_EQ(batch.pages, 0U);
  ASSERT_NE(batch.message, nullptr);
  const std::vector<int> expected = {0, 4, 3, 2, 1, 9, 9, 9};
  std::vector<int> bytes;
  for (const std::byte b : *batch.message) bytes.push_back(static_cast<int>(b));
  EXPECT_EQ(bytes, expected);
}

TEST(Request, ARewriteGivesTheBatchesOfOtherRequestsAgain) {
  Fixture f;
  const auto table = f.table({4, 0, 9}, {7, 3, 0}, 20, 3000);
  auto single = Request::make(f.source, f.target, 900, std::nullopt, SingleWrite{50, 60});
  single->split(500);
  Rewrite again;
  again.batches = {{table, 1, 2}, {single, 1, 1}};
  auto request = Request::make(nullptr, nullptr, 0, 5, std::move(again));
  request->count_at_end(2);
  EXPECT_FALSE(request->counted());
  EXPECT_EQ(request->pages_at_end(), 2U);
  // And the batches of that request again: links break while others are being recovered.
  Rewrite third;
  third.batches = {{request, 1, 1}, {request, 0, 2}};
  const Request outer(nullptr, nullptr, 0, 5, std::move(third));
  std::array<PageWrite, 64> pages;
  for (const auto& [from, position] : {std::pair<const Request*, size_t>{request.get(), 0}, {&outer, 1}}) {
    const Request::Batch batch = from->batch(position, pages, 1);
    EXPECT_EQ(batch.steps, 1U);
    EXPECT_EQ(batch.pages, 2U);
    EXPECT_EQ(batch.page_bytes, 8U);
    EXPECT_EQ(batch.source, f.source->memory.get());
    EXPECT_EQ(pages[0].target_offset, 2U + 3000 + 3 * 100);
    EXPECT_EQ(pages[1].target_offset, 2U + 3000);
  }
  for (const auto& [from, position] : {std::pair<const Request*, size_t>{request.get(), 1}, {&outer, 0}}) {
    const Request::Batch batch = from->batch(position, pages, 1);
    EXPECT_EQ(batch.page_bytes, 400U);
    EXPECT_EQ(pages[0].source, f.memory.data() + 50 + 500);
  }
}

TEST(Request, PagesComeInTheirOrderAndAgainUntilAdvanced) {
  Fixture f;
  const RequestRef made = f.table({4, 0, 9}, {7, 3, 0}, 20, 3000);
  Request& request = *made;
  std::array<PageWrite, 2> pages;
  for (int repeat = 0; repeat < 2; ++repeat) {
    ASSERT_EQ(request.batch(request.position(), pages, kNoLimit).pages, 2U);
    EXPECT_EQ(pages[0].source, f.memory.data() + 1 + 20 + 4 * 10);
    EXPECT_EQ(pages[0].target_offset, 2U + 3000 + 7 * 100);
    EXPECT_EQ(pages[1].source, f.memory.data() + 1 + 20);
    EXPECT_EQ(pages[1].target_offset, 2U + 3000 + 3 * 100);
  }
  request.advance(2);
  EXPECT_FALSE(request.done());
  ASSERT_EQ(request.batch(request.position(), pages, kNoLimit).pages, 1U);
  EXPECT_EQ(pages[0].source, f.memory.data() + 1 + 20 + 9 * 10);
  EXPECT_EQ(pages[0].target_offset, 2U + 3000);
  request.advance(1);
  EXPECT_TRUE(request.done());
}

TEST(Request, ABatchOfATableEndsAtTheLimitButHasOnePage) {
  Fixture f;
  const RequestRef request = f.table({4, 0, 9}, {7, 3, 0}, 20, 3000);
  std::array<PageWrite, 64> pages;
  EXPECT_EQ(request->batch(0, pages, 23).pages, 2U);
  EXPECT_EQ(request->batch(0, pages, 24).pages, 3U);
  EXPECT_EQ(request->batch(0, pages, 1).pages, 1U);
}

TEST(Request, ASingleWriteGoesAgainWithOtherOffsetsAndAnotherLength) {
  Fixture f;
  Request request(f.source, f.target, 900, 7, SingleWrite{50, 60});
  std::array<PageWrite, 64> pages;
  request.split(400);
  request.advance(3);
  ASSERT_TRUE(request.done());
  request.again(1, 2, 30);
  EXPECT_FALSE(request.done());
  EXPECT_TRUE(request.counted());
  const Request::Batch batch = request.batch(0, pages, kNoLimit);
  EXPECT_EQ(batch.page_bytes, 30U);
  EXPECT_EQ(pages[0].source, f.memory.data() + 1);
  EXPECT_EQ(pages[0].target_offset, 2U);
  request.again(0, 0, 0);  // only its immediate
  EXPECT_EQ(request.batch(0, pages, kNoLimit).bytes(), 0U);
  EXPECT_EQ(request.batch(0, pages, kNoLimit).source, nullptr);
  EXPECT_TRUE(request.counted());
}

TEST(Request, AnEmptyTableIsDoneFromTheStart) {
  Fixture f;
  EXPECT_TRUE(f.table({}, {}, 0, 0)->done());
}

}  // namespace
}  // namespace kvc
