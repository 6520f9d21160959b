// What engines hand each other through the authenticated control plane: offers, answers, region descriptors.
//
// Every message begins with a magic, a version and its kind. Decoding trusts nothing: nullopt for anything that is
// not exactly one well-formed message of that kind.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lane/domain.h"

namespace kvc {

// Far above what any machine has; they bound what a hostile message can make us allocate.
inline constexpr uint32_t kMaxLanes = 8;
inline constexpr uint32_t kMaxDomains = 16;
inline constexpr uint32_t kMaxLinkBytes = 4096;
inline constexpr uint32_t kMaxNameBytes = 255;
// Of one descriptor: ten times the tensors of the largest models.
inline constexpr uint32_t kMaxRegions = 1U << 17;

// One link of a lane: `domain`, of the offerer's `domains` in it, is its end.
struct LaneOffer {
  std::string provider;
  uint32_t domains = 0;
  uint32_t domain = 0;
  Bytes link;
};

struct Offer {
  std::string engine;
  std::vector<LaneOffer> lanes;  // in the offerer's order of preference
};

// The lane that the acceptor took, and its end of the link: `domain` of its `domains`.
struct Answer {
  std::string engine;
  std::string provider;
  uint32_t domains = 0;
  uint32_t domain = 0;
  Bytes link;
};

// Regions, and the registered memory that they lie in.
struct RegionDescriptor {
  // The lanes of an engine, the same for all its memory.
  struct Lane {
    std::string provider;
    uint32_t domains = 0;
  };
  struct Memory {
    uint64_t base = 0;
    uint64_t bytes = 0;
    std::vector<std::vector<uint64_t>> rkeys;  // by lane one per domain; none: the lane does not take this memory
  };
  struct Region {
    uint32_t memory = 0;
    uint64_t offset = 0;  // in it
    uint64_t bytes = 0;
  };
  std::vector<Lane> lanes;
  std::vector<Memory> memories;
  std::vector<Region> regions;
};

Bytes encode(const Offer& offer);
Bytes encode(const Answer& answer);
Bytes encode(const RegionDescriptor& descriptor);
std::optional<Offer> decode_offer(std::span<const std::byte> bytes);
std::optional<Answer> decode_answer(std::span<const std::byte> bytes);
std::optional<RegionDescriptor> decode_region_descriptor(std::span<const std::byte> bytes);

}  // namespace kvc
