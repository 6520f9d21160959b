#include "engine/link_tally.h"

namespace kvc {

namespace {

constexpr uint32_t kGenerations = 1U << Immediate::kGenerationBits;

// Generations wrap around: a generation less than half the range ahead is newer.
bool newer(uint32_t generation, uint32_t than) {
  const uint32_t ahead = (generation - than) % kGenerations;
  return ahead != 0 && ahead < kGenerations / 2;
}

uint32_t generation_of(uint32_t entry) { return (entry / LinkTally::kModulus) % kGenerations; }

}  // namespace

void LinkTally::add(uint32_t immediate) {
  const Immediate imm = Immediate::decode(immediate);
  if (chunks_.empty()) chunks_.resize(kChunks);
  std::unique_ptr<Chunk>& chunk = chunks_[imm.slot / kChunkSlots];
  if (chunk == nullptr) chunk = std::make_unique<Chunk>();
  uint32_t& entry = (*chunk)[imm.slot % kChunkSlots];
  if ((entry & kUsed) == 0 || newer(imm.generation, generation_of(entry))) {
    entry = kUsed | imm.generation * kModulus;
  } else if (generation_of(entry) != imm.generation) {
    return;
  }
  entry = (entry & ~(kModulus - 1)) | ((entry + imm.multiplicity) & (kModulus - 1));
}

std::optional<uint32_t> LinkTally::pages(uint32_t immediate) const {
  const Immediate imm = Immediate::decode(immediate);
  const Chunk* chunk = chunks_.empty() ? nullptr : chunks_[imm.slot / kChunkSlots].get();
  const uint32_t entry = chunk == nullptr ? 0 : (*chunk)[imm.slot % kChunkSlots];
  if ((entry & kUsed) == 0 || newer(imm.generation, generation_of(entry))) return 0;
  if (generation_of(entry) != imm.generation) return std::nullopt;
  return entry & (kModulus - 1);
}

}  // namespace kvc
