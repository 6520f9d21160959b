// Page sums: 64 bits for each page, by which two engines compare their copies of it.
//
// A page's bytes are read as words of 8 bytes, the last word of each run filled up with zeros. A word is mixed with its
// place in the page by a bijection, and the page's sum is the sum of all mixed words modulo 2^64. Bit flips within one word
// therefore always change the sum. Any other difference, such as two words or pages in each other's place, keeps it with a
// probability of about 2^-64. The order of the additions does not matter, so a GPU may use any.
//
// Included by nvcc and by the C++ compiler.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVC_HOST_DEVICE __host__ __device__
#else
#define KVC_HOST_DEVICE
#endif

namespace kvc {

// The place of word k: k + 1 times this odd number, which is 2^64 divided by the golden ratio.
inline constexpr uint64_t kWordStep = 0x9E3779B97F4A7C15;

// Mixes a word with its place. Two multiplications by odd numbers and shifts of half a word, each of which is a
// bijection. A GPU shifts by half a word without an instruction.
KVC_HOST_DEVICE inline uint64_t mix_word(uint64_t word, uint64_t place) {
  constexpr uint64_t kFactor = 0xD6E8FEB86659FD93;
  uint64_t mixed = word + place;
  mixed ^= mixed >> 32;
  mixed *= kFactor;
  mixed ^= mixed >> 32;
  mixed *= kFactor;
  return mixed ^ (mixed >> 32);
}

// Pages of several layers in the same blocks, and their sums. The page of layer l in block b consists of runs of
// `run_bytes` bytes, at layers[l] + b * stride + runs[r]. Its sum is sums[l * block_count + i] for b = blocks[i].
struct PageSums {
  const uint64_t* layers;  // addresses of block 0
  const uint32_t* blocks;
  const uint64_t* runs;
  uint64_t* sums;
  uint64_t stride;
  uint64_t run_bytes;
  uint32_t layer_count;
  uint32_t block_count;
  uint32_t run_count;
};

// Computes the sums on this thread. Blocks for as long as reading the pages takes.
void sum_pages(const PageSums& pages) noexcept;

}  // namespace kvc
