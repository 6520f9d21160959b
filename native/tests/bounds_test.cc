// fits(): sums that overflow.
#include "base/bounds.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace kvc {
namespace {

TEST(Bounds, APieceFitsUpToTheEndAndNoSumOverflows) {
  EXPECT_TRUE(fits(0, 0, 0));
  EXPECT_TRUE(fits(0, 8, 8));
  EXPECT_TRUE(fits(8, 0, 8)) << "nothing, at the end";
  EXPECT_FALSE(fits(9, 0, 8));
  EXPECT_FALSE(fits(1, 8, 8));
  EXPECT_FALSE(fits(UINT64_MAX, 2, 8)) << "ends at 1";
  EXPECT_FALSE(fits(2, UINT64_MAX, 8)) << "ends at 1";
  EXPECT_TRUE(fits(UINT64_MAX - 1, 1, UINT64_MAX));
}

}  // namespace
}  // namespace kvc
