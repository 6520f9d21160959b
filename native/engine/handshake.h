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

#include "engine/domain.h"

namespace kvc {

// Far above what any machine has; they bound what a hostile message can make us allocate.
inline constexpr uint32_t kMaxLanes = 8;
inline constexpr uint32_t kMaxDomains = 16;
inline constexpr uint32_t kMaxLinkBytes = 4096;
inline constexpr uint32_t kMaxNameBytes = 255;

// All domains of one provider, and the bytes of the links that they offer: link i belongs to domain i % domains.
struct LaneOffer {
  std::string provider;
  uint32_t domains = 0;
  std::vector<Bytes> links;
};

struct Offer {
  std::string engine;
  std::vector<LaneOffer> lanes;  // in the offerer's order of preference
};

// The lane that the acceptor took, with its answer for each link it uses: the first of those offered. On the
// acceptor's side link i belongs to domain i % domains.
struct Answer {
  std::string engine;
  std::string provider;
  uint32_t domains = 0;
  std::vector<Bytes> links;
};

struct RegionDescriptor {
  struct Lane {
    std::string provider;
    std::vector<uint64_t> rkeys;  // one per domain
  };
  uint64_t base = 0;
  uint64_t bytes = 0;
  std::vector<Lane> lanes;
};

Bytes encode(const Offer& offer);
Bytes encode(const Answer& answer);
Bytes encode(const RegionDescriptor& descriptor);
std::optional<Offer> decode_offer(std::span<const std::byte> bytes);
std::optional<Answer> decode_answer(std::span<const std::byte> bytes);
std::optional<RegionDescriptor> decode_region_descriptor(std::span<const std::byte> bytes);

}  // namespace kvc
