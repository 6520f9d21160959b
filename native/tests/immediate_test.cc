#include "lane/immediate.h"

#include <gtest/gtest.h>

namespace kvc {
namespace {

TEST(Immediate, EncodesAndDecodesTheEdgesOfEveryField) {
  for (const uint32_t slot : {0U, 1U, 65534U, 65535U}) {
    for (const uint32_t generation : {0U, 1U, 1022U, 1023U}) {
      for (const uint32_t multiplicity : {1U, 2U, 63U, 64U}) {
        const Immediate decoded = Immediate::decode(Immediate{slot, generation, multiplicity}.encode());
        EXPECT_EQ(decoded.slot, slot);
        EXPECT_EQ(decoded.generation, generation);
        EXPECT_EQ(decoded.multiplicity, multiplicity);
      }
    }
  }
}

TEST(Immediate, EveryThirtyTwoBitPatternIsAValidImmediate) {
  for (uint64_t raw = 0; raw <= UINT32_MAX; raw += 65521) {  // a prime: visits all fields
    EXPECT_EQ(Immediate::decode(static_cast<uint32_t>(raw)).encode(), static_cast<uint32_t>(raw));
  }
}

TEST(Immediate, WithMultiplicityChangesNothingElse) {
  const uint32_t raw = Immediate{4711, 815, 1}.encode();
  for (uint32_t pages = 1; pages <= Immediate::kMaxMultiplicity; ++pages) {
    const Immediate decoded = Immediate::decode(Immediate::with_multiplicity(raw, pages));
    EXPECT_EQ(decoded.slot, 4711U);
    EXPECT_EQ(decoded.generation, 815U);
    EXPECT_EQ(decoded.multiplicity, pages);
  }
}

}  // namespace
}  // namespace kvc
