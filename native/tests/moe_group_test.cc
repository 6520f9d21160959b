// An expert group's layout, and every input that it refuses. Two ranks in one process and one thread, where the halves
// of an operation do not wait for each other.
#include <sys/mman.h>

#include "tests/moe_test_support.h"

namespace kvc::moe {
namespace {

TEST(MoeLayout, AreasFollowEachOther) {
  for (const uint64_t dispatch : {1ULL, 4095ULL, 4096ULL, 4097ULL, 1ULL << 33}) {
    for (const uint64_t combine : {1ULL, 8192ULL, 100'000ULL}) {
      const Layout layout{dispatch, combine};
      uint64_t end = Layout::flag_bytes();
      for (uint32_t slot = 0; slot < kMaxSlots; ++slot) {
        EXPECT_EQ(layout.dispatch(slot), end);
        EXPECT_EQ(layout.dispatch(slot) % kAreaAlignment, 0U);
        EXPECT_EQ(layout.combine(slot) % kAreaAlignment, 0U);
        EXPECT_GE(layout.combine(slot), layout.dispatch(slot) + dispatch);
        EXPECT_LT(layout.combine(slot), layout.dispatch(slot) + dispatch + kAreaAlignment);
        EXPECT_GE(layout.bytes(slot + 1), layout.combine(slot) + combine);
        end = layout.bytes(slot + 1);
      }
    }
  }
}

TEST(MoeLayout, EveryFlagHasALineOfItsOwn) {
  std::vector<uint64_t> flags;
  for (uint32_t slot = 0; slot < kMaxSlots; ++slot) {
    for (uint32_t rank = 0; rank < kMaxRanks; ++rank) {
      flags.push_back(Layout::arrived(slot) + uint64_t{rank} * kFlagBytes);
      flags.push_back(Layout::ready(slot) + uint64_t{rank} * kFlagBytes);
      flags.push_back(Layout::waiting(slot) + uint64_t{rank} * kFlagBytes);
    }
  }
  for (uint32_t rank = 0; rank < kMaxRanks; ++rank) flags.push_back(Layout::evicted() + uint64_t{rank} * kFlagBytes);
  std::sort(flags.begin(), flags.end());
  EXPECT_EQ(std::adjacent_find(flags.begin(), flags.end()), flags.end());
  for (const uint64_t flag : flags) EXPECT_EQ(flag % 128, 0U);
  EXPECT_LE(flags.back() + kFlagBytes, Layout::flag_bytes());
}

GroupConfig config(uint32_t rank) {
  GroupConfig config;
  config.rank = rank;
  config.ranks = 2;
  config.dispatch_bytes = 8192;
  config.combine_bytes = 4096;
  config.max_tokens = 16;
  config.experts = 4;
  config.slots = 2;
  config.timeout_ns = 10'000'000'000;
  return config;
}

template <typename Outcome>
void expect_refused(const Outcome& outcome, const std::string& words, ErrorCode code = ErrorCode::kInvalidArgument) {
  ASSERT_FALSE(outcome.ok()) << words;
  EXPECT_EQ(outcome.error().code, code) << outcome.error().to_string();
  EXPECT_NE(outcome.error().message.find(words), std::string::npos) << outcome.error().to_string();
}

// Ranks 0 and 1 of one group.
class MoeGroup : public testing::Test {
 protected:
  MoeGroup() {
    for (uint32_t rank : {0U, 1U}) groups_[rank] = must(Group::create(config(rank)));
    for (uint32_t rank : {0U, 1U}) must(groups_[rank]->attach(1 - rank, must(groups_[1 - rank]->descriptor()).get()));
  }
  Group& a() { return *groups_[0]; }
  Group& b() { return *groups_[1]; }

  // Two tokens of each rank, one expert per token, one column.
  Status dispatch(uint32_t rank, std::vector<int32_t> ids, uint32_t phases) {
    ids_[rank] = std::move(ids);
    rows_[rank].assign(2 * 16, static_cast<unsigned char>(rank + 1));
    const ColumnSpec column{rows_[rank].data(), 16, 256, false};
    return groups_[rank]->dispatch(nullptr, 0, sizes_, ids_[rank].data(), 4, 1, {&column, 1}, phases);
  }
  // Which of the four rows the rank has.
  std::string rows(uint32_t rank) {
    std::string found;
    unsigned char* area = groups_[rank]->base() + groups_[rank]->layout().dispatch(0) + 256;
    for (int row = 0; row < 4; ++row) found += static_cast<char>('0' + area[row * 16]);
    std::memset(area, 0, 4 * 16);
    return found;
  }
  // Both ranks send tokens to the experts. Returns the rows that each rank has afterwards.
  std::string exchange(const std::vector<int32_t>& ids_of_a, const std::vector<int32_t>& ids_of_b) {
    must(dispatch(0, ids_of_a, kSend));
    must(dispatch(1, ids_of_b, kSend));
    must(dispatch(0, ids_of_a, kReceive));
    must(dispatch(1, ids_of_b, kReceive));
    return rows(0) + " " + rows(1);
  }

  std::array<std::unique_ptr<Group>, 2> groups_;
  std::array<std::vector<int32_t>, 2> ids_;
  std::array<std::vector<unsigned char>, 2> rows_;
  std::array<uint32_t, 2> sizes_{2, 2};
};

TEST_F(MoeGroup, RefusesAConfigurationThatCannotBe) {
  const auto with = [](auto change) {
    GroupConfig changed = config(0);
    change(changed);
    return Group::create(changed);
  };
  expect_refused(with([](GroupConfig& c) { c.ranks = 0; }), "0 ranks");
  expect_refused(with([](GroupConfig& c) { c.ranks = 9; }), "9 ranks: 1 to 8");
  expect_refused(with([](GroupConfig& c) { c.rank = 2; }), "rank 2 of 2");
  expect_refused(with([](GroupConfig& c) { c.slots = 0; }), "slots");
  expect_refused(with([](GroupConfig& c) { c.slots = 3; }), "slots");
  expect_refused(with([](GroupConfig& c) { c.max_tokens = 0; }), "must not be 0");
  expect_refused(with([](GroupConfig& c) { c.dispatch_bytes = 0; }), "must not be 0");
  expect_refused(with([](GroupConfig& c) { c.combine_bytes = 0; }), "must not be 0");
  expect_refused(with([](GroupConfig& c) { c.dispatch_bytes = ~0ULL; }), "1 TiB");
  expect_refused(with([](GroupConfig& c) { c.combine_bytes = ~0ULL; }), "1 TiB");
  expect_refused(with([](GroupConfig& c) { c.max_tokens = ~0U; }), "2^24");
  expect_refused(with([](GroupConfig& c) { c.experts = ~0U; }), "2^16");
  expect_refused(with([](GroupConfig& c) { c.timeout_ns = 0; }), "timeout");
  expect_refused(with([](GroupConfig& c) { c.timeout_ns = ~0ULL; }), "timeout");
  expect_refused(with([](GroupConfig& c) { c.device = -2; }), "device -2");
}

TEST_F(MoeGroup, RefusesASegmentThatIsNotAPeers) {
  const auto group = must(Group::create(config(0)));
  std::array<uint32_t, 2> sizes{};
  const ColumnSpec column{sizes.data(), 16, 0, false};
  expect_refused(group->dispatch(nullptr, 0, sizes, nullptr, 4, 1, {&column, 1}, kSend), "rank 1 is not attached");
  expect_refused(group->combine(nullptr, 0, sizes, nullptr, 8, false, kSend), "rank 1 is not attached");
  const UniqueFd good = must(b().descriptor());
  EXPECT_NE(fcntl(good.get(), F_GETFD) & FD_CLOEXEC, 0);
  expect_refused(group->attach(0, good.get()), "attached already");
  expect_refused(group->attach(2, good.get()), "not in the group");
  EXPECT_FALSE(group->attach(1, -1).ok());
  const UniqueFd small(memfd_create("small", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(small.get(), static_cast<off_t>(group->segment_bytes()) - 1), 0);
  expect_refused(group->attach(1, small.get()), "bytes, not ");
  const UniqueFd unsealed(memfd_create("unsealed", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(unsealed.get(), static_cast<off_t>(group->segment_bytes())), 0);
  EXPECT_FALSE(group->attach(1, unsealed.get()).ok()) << "it may shrink under the mapping";
  must(group->attach(1, good.get()));
  EXPECT_NE(ftruncate(good.get(), 0), 0) << "it cannot shrink any more";
  expect_refused(group->attach(1, good.get()), "attached already");
}

TEST_F(MoeGroup, RefusesADispatchThatCannotBe) {
  std::vector<unsigned char> memory(4096);
  const std::vector<int64_t> ids(64);
  std::vector<uint32_t> sizes = {2, 2};
  std::vector<ColumnSpec> columns = {{memory.data(), 16, 0, false}};
  uint32_t slot = 0;
  const void* chosen = ids.data();
  uint32_t ids_bytes = 8;
  uint32_t top_k = 1;
  uint32_t phases = kSend;
  must(a().place(std::vector<uint32_t>{1, 0, 1, 0}));
  const auto refused = [&](const std::string& words) {
    expect_refused(a().dispatch(nullptr, slot, sizes, chosen, ids_bytes, top_k, columns, phases), words);
    slot = 0;
    sizes = {2, 2};
    columns = {{memory.data(), 16, 0, false}};
    chosen = ids.data();
    ids_bytes = 8;
    top_k = 1;
    phases = kSend;
  };
  slot = 2;
  refused("slot 2");
  sizes = {2};
  refused("1 sizes for 2 ranks");
  sizes = {2, 17};
  refused("17 tokens of rank 1");
  columns.clear();
  refused("0 columns");
  columns.assign(9, columns[0]);
  refused("9 columns");
  ids_bytes = 2;
  refused("ids of 2 bytes");
  top_k = 0;
  refused("0 experts a token");
  top_k = 33;
  refused("33 experts a token");
  phases = 0;
  refused("no such phase");
  phases = 4;
  refused("no such phase");
  columns[0].row_bytes = 0;
  refused("empty");
  columns[0].offset = 128;
  refused("not aligned");
  columns.push_back({memory.data(), 16, 0, false});
  refused("overlaps");
  columns[0].row_bytes = 2049;
  refused("4 bytes past the end of the dispatch area");
  columns[0].offset = 8192;
  refused("64 bytes past the end of the dispatch area");
  columns[0].offset = ~0ULL << 8;
  columns[0].row_bytes = 64;  // the sum is 0
  refused("column 0");
  sizes = {0, 0};
  columns[0].row_bytes = ~0U;
  refused("16 MiB");
  columns[0].source = nullptr;
  refused("no source");
  chosen = nullptr;
  refused("no ids");
  chosen = reinterpret_cast<const unsigned char*>(ids.data()) + 4;
  refused("not aligned");
  must(a().dispatch(nullptr, 0, sizes, ids.data(), 8, 1, columns, kSend));
  must(a().place({}));
  must(a().dispatch(nullptr, 0, sizes, nullptr, 4, 1, columns, kSend));  // needs no ids
  sizes = {0, 2};
  columns[0].source = nullptr;
  must(a().dispatch(nullptr, 0, sizes, nullptr, 4, 1, columns, kSend));  // has no tokens
}

TEST_F(MoeGroup, RefusesACombineThatCannotBe) {
  std::vector<unsigned char> memory(4096 + 16);
  unsigned char* const out = memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16;
  const auto combine = [&](uint32_t slot, std::vector<uint32_t> sizes, void* target, uint32_t hidden, uint32_t phases) {
    return a().combine(nullptr, slot, sizes, target, hidden, false, phases);
  };
  expect_refused(combine(2, {2, 2}, out, 8, kSend), "slot 2");
  expect_refused(combine(0, {2, 2, 2}, out, 8, kSend), "3 sizes");
  expect_refused(combine(0, {17, 2}, out, 8, kSend), "17 tokens of rank 0");
  expect_refused(combine(0, {2, 2}, out, 0, kSend), "hidden size of 0");
  expect_refused(combine(0, {2, 2}, out, 12, kSend), "hidden size of 12");
  expect_refused(combine(0, {2, 2}, out, 520, kSend), "combine area");
  expect_refused(combine(0, {2, 2}, out, 0xfffffff8U, kSend), "combine area");
  expect_refused(combine(0, {2, 2}, out + 8, 8, kSend), "16 bytes");
  expect_refused(combine(0, {2, 2}, nullptr, 8, kSend), "no `out`");
  expect_refused(combine(0, {2, 2}, out, 8, 0), "no such phase");
  expect_refused(combine(0, {2, 2}, out, 8, 4), "no such phase");
  EXPECT_TRUE(combine(0, {2, 2}, out, 512, kSend).ok());
  EXPECT_TRUE(combine(0, {0, 2}, nullptr, 512, kSend).ok());
}

TEST_F(MoeGroup, ARefusedPlacementLeavesTheOneBefore) {
  EXPECT_EQ(exchange({0, 1}, {2, 3}), "1122 1122") << "at first all rows go to all ranks";
  for (const std::vector<uint32_t>& owners : {std::vector<uint32_t>{0, 0, 1, 1}, std::vector<uint32_t>{1, 0, 0, 1}}) {
    must(a().place(owners));
    must(b().place(owners));
    const std::string placed = owners[0] == 0 ? "1020 0102" : "0120 1002";
    EXPECT_EQ(exchange({0, 2}, {1, 3}), placed.substr(0, 4) + " " + placed.substr(5)) << owners[0];
    expect_refused(a().place(std::vector<uint32_t>{1, 1, 1}), "3 owners for 4 experts");
    expect_refused(a().place(std::vector<uint32_t>{1, 1, 1, 2}), "rank 2 is not in the group");
    EXPECT_EQ(exchange({0, 2}, {1, 3}), placed) << "after a refusal";
  }
  must(a().place({}));
  must(b().place({}));
  EXPECT_EQ(exchange({0, 1}, {2, 3}), "1122 1122");
}

TEST_F(MoeGroup, AClosedGroupDoesNothing) {
  const UniqueFd segment = must(a().descriptor());
  must(a().close(1'000'000'000));
  must(a().close(1'000'000'000));
  const ErrorCode code = ErrorCode::kClosed;
  expect_refused(a().descriptor(), "closed", code);
  expect_refused(a().attach(1, segment.get()), "closed", code);
  expect_refused(a().place({}), "closed", code);
  expect_refused(dispatch(0, {0, 1}, kSend), "closed", code);
  expect_refused(a().combine(nullptr, 0, sizes_, rows_[0].data(), 8, false, kSend), "closed", code);
  a().lose(1);
  EXPECT_FALSE(a().fault().has_value());
  EXPECT_EQ(a().base(), nullptr);
  // Its memory lives as long as the peers map it.
  must(dispatch(1, {0, 1}, kSend));
}

TEST_F(MoeGroup, NoPeerIsLostWhoseRowsAreThere) {
  must(dispatch(0, {0, 1}, kSend));
  must(dispatch(1, {2, 3}, kSend));
  a().lose(1);
  a().lose(77);
  must(dispatch(0, {0, 1}, kReceive));
  EXPECT_FALSE(a().fault().has_value());
  EXPECT_EQ(rows(0), "1122");
  must(a().combine(nullptr, 0, sizes_, rows_[0].data(), 8, false, kSend | kReceive));
  ASSERT_TRUE(a().fault().has_value());
  EXPECT_EQ(a().fault()->first, Fault::kLost);
  EXPECT_EQ(a().fault()->second, 1U);
}

}  // namespace
}  // namespace kvc::moe
