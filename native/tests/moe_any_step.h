// Steps of an expert group that cover every input together, drawn by a seed.
#pragma once

#include "tests/moe_test_support.h"

namespace kvc::moe {

// The rank of each expert, in no order.
inline std::vector<uint32_t> table(uint32_t ranks) {
  std::vector<uint32_t> owners(Stepper::kExperts);
  for (uint32_t i = 0; i < owners.size(); ++i) owners[i] = (i * i + 1) % ranks;
  owners[3] = 0;
  owners[5] = ranks - 1;
  return owners;
}

// A step that every rank can compute. Together the steps have every number of experts, both kinds of ids, all
// placements and routings, columns of every unit, empty ranks and empty steps.
inline Step any_step(uint64_t seed, uint32_t ranks) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  const auto below = [&](uint32_t count) { return static_cast<uint32_t>(random() % count); };
  Step step;
  step.seed = seed;
  step.slot = below(2);
  for (uint32_t rank = 0; rank < ranks; ++rank) step.sizes.push_back(below(3) == 0 ? 0 : 1 + below(12));
  if (seed % 16 == 1) step.sizes.assign(ranks, 0);
  if (seed % 16 == 2) step.sizes.assign(ranks, 8);
  step.top_k = 1 + seed % 8;
  step.ids_bytes = seed / 8 % 2 == 0 ? 4 : 8;
  const uint32_t placing = seed % 5;
  if (placing >= 2) step.owners = equal_blocks(ranks);
  if (placing == 1 || placing == 4) step.owners = table(ranks);
  step.routing = static_cast<Routing>(below(8) < 5 ? 0 : 1 + below(3));
  const std::array<uint32_t, 10> widths = {16, 512, 32, 1, 3, 4, 20, 64, 5, 240};
  step.shapes.clear();
  for (uint32_t i = 0; i <= seed % kMaxColumns; ++i) {
    step.shapes.push_back({widths[below(10)], below(3) == 0, below(3) == 0 ? 4 * below(4) + below(2) : 0});
  }
  step.hidden = 8 * (1 + below(20));
  step.accumulate = below(3) == 0;
  step.halves = below(2) == 0;
  return step;
}

}  // namespace kvc::moe
