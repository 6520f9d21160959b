#include "lane/page_runs.h"

#include <gtest/gtest.h>

#include <tuple>

namespace kvc {
namespace {

using Runs = std::vector<std::tuple<size_t, uint64_t, uint32_t>>;  // source offset, target offset, pages

Runs runs_of(const std::vector<std::pair<size_t, uint64_t>>& pages, uint64_t page_bytes, uint64_t max = UINT64_MAX) {
  static const std::vector<std::byte> memory(1 << 16);
  std::vector<PageWrite> list;
  for (const auto& [source, target] : pages) list.push_back({memory.data() + source, target});
  Runs runs;
  for_each_run(WriteBatch{.page_bytes = page_bytes, .pages = list}, max, [&](const PageRun& run) {
    runs.emplace_back(run.source - memory.data(), run.target_offset, run.pages);
  });
  return runs;
}

TEST(PageRuns, PagesThatFollowEachOtherOnBothSidesAreOneRun) {
  EXPECT_EQ(runs_of({{0, 800}, {8, 808}, {16, 816}, {24, 824}}, 8), (Runs{{0, 800, 4}}));
}

TEST(PageRuns, AGapOnEitherSideEndsARun) {
  EXPECT_EQ(runs_of({{0, 0}, {8, 8}, {17, 16}, {25, 24}, {33, 33}}, 8), (Runs{{0, 0, 2}, {17, 16, 2}, {33, 33, 1}}));
  EXPECT_EQ(runs_of({{8, 8}, {0, 0}}, 8), (Runs{{8, 8, 1}, {0, 0, 1}}));  // in reverse order
  EXPECT_EQ(runs_of({{0, 0}, {0, 8}}, 8), (Runs{{0, 0, 1}, {0, 8, 1}}));  // one source twice
}

TEST(PageRuns, ARunEndsBeforeItWouldBeTooLong) {
  EXPECT_EQ(runs_of({{0, 0}, {8, 8}, {16, 16}, {24, 24}, {32, 32}}, 8, 17),
            (Runs{{0, 0, 2}, {16, 16, 2}, {32, 32, 1}}));
  EXPECT_EQ(runs_of({{0, 0}, {8, 8}}, 8, 1), (Runs{{0, 0, 1}, {8, 8, 1}}));
}

TEST(PageRuns, AnImmediateAloneIsOneRun) { EXPECT_EQ(runs_of({{0, 0}, {0, 0}, {0, 0}}, 0, 1), (Runs{{0, 0, 3}})); }

TEST(PageRuns, NoPagesAreNoRun) { EXPECT_TRUE(runs_of({}, 8).empty()); }

}  // namespace
}  // namespace kvc
