#include "engine/link_tally.h"

#include <gtest/gtest.h>

namespace kvc {
namespace {

uint32_t immediate(uint32_t slot, uint32_t generation, uint32_t pages = 1) {
  return Immediate{slot, generation, pages}.encode();
}

TEST(LinkTally, CountsPagesOfEachCounter) {
  LinkTally tally;
  EXPECT_EQ(tally.pages(immediate(3, 0)), 0U);
  tally.add(immediate(3, 0, 64));
  tally.add(immediate(3, 0, 1));
  tally.add(immediate(65535, 600, 2));
  EXPECT_EQ(tally.pages(immediate(3, 0)), 65U);
  EXPECT_EQ(tally.pages(immediate(65535, 600)), 2U);
  EXPECT_EQ(tally.pages(immediate(4, 0)), 0U);
  tally.clear();
  EXPECT_EQ(tally.pages(immediate(3, 0)), 0U);
}

TEST(LinkTally, ANewerGenerationReplacesAnOlderOneAndNeverTheOtherWayRound) {
  LinkTally tally;
  for (uint32_t generation : {0U, 1U, 500U, 1000U, 3U}) {  // 3 is newer than 1000: generations wrap around at 1024
    tally.add(immediate(7, generation, 5));
    EXPECT_EQ(tally.pages(immediate(7, generation)), 5U) << generation;
  }
  tally.add(immediate(7, 1000, 9));  // late
  EXPECT_EQ(tally.pages(immediate(7, 3)), 5U);
  EXPECT_EQ(tally.pages(immediate(7, 1000)), std::nullopt);
  EXPECT_EQ(tally.pages(immediate(7, 4)), 0U);
}

TEST(LinkTally, DifferencesHoldWhereACountGoesRound) {
  LinkTally posted;
  LinkTally counted;
  for (uint32_t i = 0; i < LinkTally::kModulus / 64 + 10; ++i) posted.add(immediate(0, 5, 64));
  for (uint32_t i = 0; i < LinkTally::kModulus / 64 - 10; ++i) counted.add(immediate(0, 5, 64));
  EXPECT_EQ((*posted.pages(immediate(0, 5)) - *counted.pages(immediate(0, 5))) % LinkTally::kModulus, 20U * 64);
}

}  // namespace
}  // namespace kvc
