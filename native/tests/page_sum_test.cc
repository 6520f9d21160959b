// Sums of pages: the host's and the GPU's are equal, and each kind of damage changes them.
#include "base/page_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <span>
#include <vector>

#include "cuda/page_summer.h"
#include "tests/cuda_test_support.h"
#include "tests/rig.h"

namespace kvc {
namespace {

using test::Cuda;
using test::GpuBuffer;
using test::must;
using test::random_bytes;

struct Shape {
  std::vector<uint64_t> layers;
  std::vector<uint32_t> blocks;
  std::vector<uint64_t> runs;
  uint64_t stride;
  uint64_t run_bytes;

  // The pages in memory that begins at `base`, with place for the sums.
  PageSums at(const void* base, std::vector<uint64_t>& places, std::vector<uint64_t>& sums) const {
    places = layers;
    for (uint64_t& place : places) place += reinterpret_cast<uintptr_t>(base);
    sums.assign(layers.size() * blocks.size(), 0);
    return {places.data(),
            blocks.data(),
            runs.data(),
            sums.data(),
            stride,
            run_bytes,
            static_cast<uint32_t>(layers.size()),
            static_cast<uint32_t>(blocks.size()),
            static_cast<uint32_t>(runs.size())};
  }
  std::vector<uint64_t> sums(const void* base) const {
    std::vector<uint64_t> places;
    std::vector<uint64_t> found;
    sum_pages(at(base, places, found));
    return found;
  }
};

// One page of one run.
Shape page_of(uint64_t bytes) { return {{0}, {0}, {0}, bytes, bytes}; }

TEST(PageSum, EveryFlippedBitChangesTheSumOfItsPageOnly) {
  const Shape shape{{0, 1000}, {2, 0}, {0, 40}, 100, 37};  // runs end within a word
  std::vector<std::byte> memory = random_bytes(2000, 1);
  const std::vector<uint64_t> before = shape.sums(memory.data());
  for (size_t layer = 0; layer < 2; ++layer) {
    for (size_t i = 0; i < 2; ++i) {
      for (const uint64_t run : shape.runs) {
        for (uint64_t bit = 0; bit < shape.run_bytes * 8; ++bit) {
          std::byte& flipped = memory[shape.layers[layer] + shape.blocks[i] * shape.stride + run + bit / 8];
          flipped ^= std::byte{1} << bit % 8;
          std::vector<uint64_t> after = shape.sums(memory.data());
          EXPECT_NE(after[layer * 2 + i], before[layer * 2 + i]) << "bit " << bit << " of run " << run;
          after[layer * 2 + i] = before[layer * 2 + i];
          EXPECT_EQ(after, before);
          flipped ^= std::byte{1} << bit % 8;
        }
      }
    }
  }
  memory[37] ^= std::byte{1};  // between the runs of block 0
  EXPECT_EQ(shape.sums(memory.data()), before);
}

// Sums that depend on their words alone, or that do not mix well, keep these.
TEST(PageSum, MovedWordsAndPairsOfFlippedBitsChangeTheSum) {
  constexpr uint64_t kWords = 64;
  const Shape shape = page_of(kWords * 8);
  std::vector<uint64_t> words(kWords);
  test::fill_random(reinterpret_cast<std::byte*>(words.data()), kWords * 8, 2);
  const uint64_t before = shape.sums(words.data())[0];
  std::set<uint64_t> seen{before};
  size_t changes = 1;
  for (uint64_t i = 0; i < kWords; ++i) {
    for (uint64_t j = i + 1; j < kWords; ++j) {
      std::swap(words[i], words[j]);
      seen.insert(shape.sums(words.data())[0]);
      std::swap(words[i], words[j]);
      for (uint64_t bit = 0; bit < 64; ++bit) {
        words[i] ^= uint64_t{1} << bit;
        words[j] ^= uint64_t{1} << bit;
        seen.insert(shape.sums(words.data())[0]);
        words[i] ^= uint64_t{1} << bit;
        words[j] ^= uint64_t{1} << bit;
      }
      changes += 65;
    }
  }
  EXPECT_EQ(seen.size(), changes);
}

TEST(PageSum, ZerosInOtherNumbersHaveOtherSums) {
  const std::vector<std::byte> zeros(4096);
  std::set<uint64_t> seen;
  for (uint64_t words = 1; words <= 512; ++words) seen.insert(page_of(words * 8).sums(zeros.data())[0]);
  EXPECT_EQ(seen.size(), 512U);
}

using PageSummer = Cuda;

TEST_F(PageSummer, SumsAreThoseOfTheHost) {
  const Shape shapes[] = {
      {{0, 1 << 16}, {3, 1, 0}, {0}, 4096, 4096},                   // whole vectors
      {{0, 1 << 16}, {0, 1, 2, 5}, {0, 2048, 512, 64}, 8192, 48},   // short runs in any order
      {{8, 40000}, {2, 7}, {0, 24}, 1000, 24},                      // words
      {{1, 50001, 70003}, {4, 1}, {0, 333}, 777, 111},              // bytes
      {{0}, std::vector<uint32_t>(300, 1), {0}, 1 << 10, 1 << 10},  // more pages than blocks of the launch
  };
  const std::vector<std::byte> data = random_bytes(1 << 17, 3);
  const GpuBuffer buffer(first_, data.size());
  buffer.put(data);
  std::unique_ptr<cuda::PageSummer> summer;
  {
    const cuda::Context::Scope scope(*first_);
    summer = must(cuda::PageSummer::create());
  }
  for (const Shape& shape : shapes) {
    std::vector<uint64_t> places;
    std::vector<uint64_t> sums;
    must(summer->sum(shape.at(buffer.data(), places, sums)));
    EXPECT_EQ(sums, shape.sums(data.data())) << shape.run_bytes;
  }
}

TEST_F(PageSummer, NeedsAContext) {
  std::thread([] {
    const auto summer = cuda::PageSummer::create();
    ASSERT_FALSE(summer.ok());
    EXPECT_EQ(summer.error().code, ErrorCode::kRefused);
  }).join();
}

TEST_F(PageSummer, WorksWhileAGraphIsCaptured) {
  std::unique_ptr<cuda::PageSummer> summer;
  {
    const cuda::Context::Scope scope(*first_);
    summer = must(cuda::PageSummer::create());
  }
  const std::vector<std::byte> data = random_bytes(4096, 4);
  const GpuBuffer buffer(first_, data.size());
  buffer.put(data);
  const Shape shape = page_of(4096);
  test::Capturing capturing(first_);
  std::vector<uint64_t> places;
  std::vector<uint64_t> sums;
  must(summer->sum(shape.at(buffer.data(), places, sums)));
  EXPECT_EQ(capturing.end(), cuda::kSuccess);
  EXPECT_EQ(sums, shape.sums(data.data()));
}

}  // namespace
}  // namespace kvc
