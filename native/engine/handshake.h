// Offers, answers and region descriptors: what transfer engines exchange through the authenticated control plane.
//
// Every message begins with a magic number, a version and its kind. Decoders trust no byte: they return nullopt unless
// the input is exactly one well-formed message of that kind.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lane/domain.h"

namespace kvc {

// Limits far above any real machine. They bound what a hostile message can allocate.
inline constexpr uint32_t kMaxLanes = 8;
inline constexpr uint32_t kMaxDomains = 16;
inline constexpr uint32_t kMaxLinkBytes = 4096;
inline constexpr uint32_t kMaxNameBytes = 255;
// Regions in one descriptor: ten times the tensors of the largest models.
inline constexpr uint32_t kMaxRegions = 1U << 17;

// One link of a lane. It ends at `domain`, one of the `domains` of the offerer's lane.
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

// The lane that the acceptor chose. The link ends at `domain`, one of the `domains` of the acceptor's lane.
struct Answer {
  std::string engine;
  std::string provider;
  uint32_t domains = 0;
  uint32_t domain = 0;
  Bytes link;
};

// Regions, and the registered memory that contains them.
struct RegionDescriptor {
  // A lane of a transfer engine. The lanes are the same for all its memory.
  struct Lane {
    std::string provider;
    uint32_t domains = 0;
  };
  struct Memory {
    uint64_t base = 0;
    uint64_t bytes = 0;
    std::vector<std::vector<uint64_t>> rkeys;  // per lane, one key per domain; empty: the lane does not take it
  };
  struct Region {
    uint32_t memory = 0;
    uint64_t offset = 0;  // offset in the memory
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
