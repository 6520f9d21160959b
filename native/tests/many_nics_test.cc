// Groups of 1 to 8 domains over every lane. Split single writes count once, runs of pages count each page, and a pinned
// write arrives like any other.

#include <cstring>
#include <numeric>
#include <tuple>

#include "tests/rig.h"

namespace kvc::test::many_nics {
namespace {

using Param = std::tuple<std::string, std::pair<size_t, size_t>>;

class ManyNics : public testing::TestWithParam<Param> {
 protected:
  std::string provider() const { return std::get<0>(GetParam()); }
  size_t senders() const { return std::get<1>(GetParam()).first; }
  size_t receivers() const { return std::get<1>(GetParam()).second; }
};
INSTANTIATE_TEST_SUITE_P(Lanes, ManyNics,
                         testing::Combine(testing::ValuesIn(providers()),
                                          testing::Values(std::pair{2, 2}, std::pair{1, 4}, std::pair{3, 2},
                                                          std::pair{8, 8})),
                         [](const auto& info) {
                           return label(std::get<0>(info.param)) + "_" + std::to_string(std::get<1>(info.param).first) +
                                  "_to_" + std::to_string(std::get<1>(info.param).second);
                         });

TEST_P(ManyNics, ASplitWriteCountsOnceAndLandsByteForByte) {
  constexpr size_t kBytes = (2 << 20) + 77;
  constexpr size_t kRoom = kBytes + 4096;
  Pair pair(provider(), kRoom, senders(), receivers());
  pair.make_links();
  fill_random(pair.sender.data(), kRoom, 1);
  std::vector<std::byte> expected(kRoom);
  const uint64_t before = pair.sender.engine->stats().pages_written;
  const auto [set, immediate] = pair.counter(1);
  const TransferId transfer = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 13,
                                                                 pair.receiver_region, 1029, kBytes, immediate));
  must(pair.receiver.engine->wait_counters(set, kLimit));
  std::memcpy(expected.data() + 1029, pair.sender.data() + 13, kBytes);
  EXPECT_EQ(std::memcmp(pair.receiver.data(), expected.data(), expected.size()), 0);
  const Event done = ended(*pair.sender.engine, transfer);
  EXPECT_EQ(done.kind, EventKind::kTransferDone);
  EXPECT_EQ(done.pages, 1U);
  EXPECT_EQ(done.bytes, kBytes);
  EXPECT_EQ(pair.count(set), 1U);
  EXPECT_EQ(pair.receiver.engine->stats().immediates_received, 1U);
  EXPECT_EQ(pair.sender.engine->stats().pages_written, before + 1);
  EXPECT_GT(pair.sender.engine->stats().batches_posted, 3U);
}

TEST_P(ManyNics, APinnedWriteArrivesOverEachDomain) {
  constexpr size_t kBytes = 1 << 20;
  Pair pair(provider(), kBytes, senders(), receivers());
  const auto [set, immediate] = pair.counter(senders());
  for (uint32_t domain = 0; domain < senders(); ++domain) {
    fill_random(pair.sender.data(), kBytes, domain);
    const TransferId transfer = must(pair.sender.engine->write_one(
        pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, kBytes, immediate, {}, domain));
    EXPECT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferDone);
    EXPECT_EQ(std::memcmp(pair.receiver.data(), pair.sender.data(), kBytes), 0);
  }
  must(pair.receiver.engine->wait_counters(set, kLimit));
  EXPECT_EQ(pair.sender.engine->stats().batches_posted, senders());
}

TEST_P(ManyNics, PagesInOrderCountLikeScatteredOnes) {
  constexpr size_t kPage = 1000;
  constexpr size_t kPages = 700;
  Pair pair(provider(), kPage * (kPages + 50), senders(), receivers());
  fill_random(pair.sender.data(), kPage * kPages, 3);
  std::vector<std::byte> expected(pair.receiver.data(), pair.receiver.data() + pair.receiver.memory.size());
  std::vector<int64_t> from(kPages);
  std::iota(from.begin(), from.end(), 0);
  std::vector<int64_t> to = from;  // with a gap at some places
  for (size_t i = 0; i < kPages; ++i) to[i] += static_cast<int64_t>(i / 17);
  const auto [set, immediate] = pair.counter(kPages);
  const PagedWrite write{kPage, pair.sender.region, {from, kPage, 0}, pair.receiver_region, {to, kPage, 0}, immediate};
  for (size_t i = 0; i < kPages; ++i) {
    std::memcpy(expected.data() + static_cast<size_t>(to[i]) * kPage, pair.sender.data() + i * kPage, kPage);
  }
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  must(pair.sender.engine->write_pages(transfer, write));
  must(pair.sender.engine->seal(transfer));
  must(pair.receiver.engine->wait_counters(set, kLimit));
  EXPECT_EQ(std::memcmp(pair.receiver.data(), expected.data(), expected.size()), 0);
  EXPECT_EQ(ended(*pair.sender.engine, transfer).pages, kPages);
  EXPECT_EQ(pair.count(set), kPages);
  EXPECT_EQ(pair.receiver.engine->stats().immediates_received, kPages);
}

}  // namespace
}  // namespace kvc::test::many_nics
