#include "engine/counter_sets.h"

#include <gtest/gtest.h>

#include <utility>

#include "tests/domain_test_support.h"

namespace kvc {
namespace {

TEST(CounterSets, AreActedOnOnceAllTargetsAreReachedOrTheirCountsAreRead) {
  test::ManualControl control;
  CounterSets counters;
  const CounterSet set = counters.allocate(2, {}).value();
  const auto acted_on = [&] {
    const bool first = counters.acted_on(set.immediates[0]);
    EXPECT_EQ(counters.acted_on(set.immediates[1]), first);
    return first;
  };
  EXPECT_FALSE(acted_on());
  ASSERT_FALSE(counters.expect(set.id, {1, 1}, {}, nullptr, 0, control).value().has_value());
  EXPECT_TRUE(counters.add(set.immediates[0], 1).reached);
  EXPECT_FALSE(counters.reached(set.id).has_value());
  EXPECT_FALSE(acted_on()) << "no event was taken";
  EXPECT_EQ(counters.values(set.id).value()[0], 1U);
  EXPECT_FALSE(acted_on()) << "a diagnosis";
  EXPECT_TRUE(counters.add(set.immediates[1], 1).reached);
  EXPECT_TRUE(counters.reached(set.id).has_value());
  EXPECT_TRUE(acted_on());
  ASSERT_FALSE(counters.expect(set.id, {2, 2}, {}, nullptr, 0, control).value().has_value());
  EXPECT_TRUE(acted_on());

  // A set whose count has reached the target already.
  const CounterSet early = counters.allocate(1, {}).value();
  counters.add(early.immediates[0], 1);
  EXPECT_FALSE(counters.acted_on(early.immediates[0]));
  EXPECT_TRUE(counters.expect(early.id, {1}, {}, nullptr, 0, control).value().has_value());
  EXPECT_TRUE(counters.acted_on(early.immediates[0]));

  const CounterSet read = counters.allocate(1, {}).value();
  EXPECT_EQ(counters.read(read.id).value(), read.immediates);
  EXPECT_TRUE(counters.acted_on(read.immediates[0]));
  ASSERT_TRUE(counters.release(read.id).ok());
  EXPECT_FALSE(counters.acted_on(read.immediates[0]));
}

}  // namespace
}  // namespace kvc
