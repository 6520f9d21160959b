#include "base/page_sum.h"

#include <cstddef>
#include <cstring>

namespace kvc {

namespace {

// Sum of one run, whose first word has the place `place`.
uint64_t sum_run(const std::byte* bytes, uint64_t nbytes, uint64_t place) noexcept {
  // Four independent sums, so that the processor overlaps the multiplications.
  uint64_t sum = 0;
  uint64_t second = 0;
  uint64_t third = 0;
  uint64_t fourth = 0;
  const uint64_t words = nbytes / 8;
  uint64_t i = 0;
  for (; i + 4 <= words; i += 4, place += 4 * kWordStep) {
    uint64_t four[4];
    std::memcpy(four, bytes + i * 8, sizeof(four));
    sum += mix_word(four[0], place);
    second += mix_word(four[1], place + kWordStep);
    third += mix_word(four[2], place + 2 * kWordStep);
    fourth += mix_word(four[3], place + 3 * kWordStep);
  }
  sum += second + third + fourth;
  for (; i * 8 < nbytes; ++i, place += kWordStep) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i * 8, i < words ? 8 : nbytes % 8);
    sum += mix_word(word, place);
  }
  return sum;
}

}  // namespace

void sum_pages(const PageSums& pages) noexcept {
  const uint64_t run_words = (pages.run_bytes + 7) / 8;
  for (uint32_t layer = 0; layer < pages.layer_count; ++layer) {
    for (uint32_t i = 0; i < pages.block_count; ++i) {
      const uint64_t page = pages.layers[layer] + pages.blocks[i] * pages.stride;
      uint64_t sum = 0;
      for (uint32_t run = 0; run < pages.run_count; ++run) {
        sum += sum_run(reinterpret_cast<const std::byte*>(page + pages.runs[run]), pages.run_bytes,
                       (run * run_words + 1) * kWordStep);
      }
      pages.sums[uint64_t{layer} * pages.block_count + i] = sum;
    }
  }
}

}  // namespace kvc
