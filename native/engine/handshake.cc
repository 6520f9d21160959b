#include "engine/handshake.h"

#include <limits>

#include "base/byte_codec.h"

namespace kvc {

namespace {

constexpr uint32_t kMagic = 0x4943564B;  // "KVCI" in memory
constexpr uint8_t kVersion = 2;
enum class Kind : uint8_t { kOffer = 1, kAnswer = 2, kRegion = 3 };

ByteWriter begin(Kind kind) {
  ByteWriter writer;
  writer.number(kMagic);
  writer.number(kVersion);
  writer.number(static_cast<uint8_t>(kind));
  return writer;
}

ByteReader open(std::span<const std::byte> bytes, Kind kind) {
  ByteReader reader(bytes);
  const bool ours = reader.number<uint32_t>() == kMagic && reader.number<uint8_t>() == kVersion &&
                    reader.number<uint8_t>() == static_cast<uint8_t>(kind);
  if (!ours) reader.fail();
  return reader;
}

// Writes the number of domains in the lane, the index of the link's domain, and the link's bytes.
void write_link(ByteWriter& writer, uint32_t domains, uint32_t domain, const Bytes& link) {
  writer.number(static_cast<uint8_t>(domains));
  writer.number(static_cast<uint8_t>(domain));
  writer.blob(link);
}

void read_link(ByteReader& reader, uint32_t& domains, uint32_t& domain, Bytes& link) {
  domains = reader.number<uint8_t>();
  domain = reader.number<uint8_t>();
  if (domains == 0 || domains > kMaxDomains || domain >= domains) reader.fail();
  const std::span<const std::byte> bytes = reader.blob(kMaxLinkBytes);
  link.assign(bytes.begin(), bytes.end());
}

}  // namespace

Bytes encode(const Offer& offer) {
  ByteWriter writer = begin(Kind::kOffer);
  writer.text(offer.engine);
  writer.number(static_cast<uint8_t>(offer.lanes.size()));
  for (const LaneOffer& lane : offer.lanes) {
    writer.text(lane.provider);
    write_link(writer, lane.domains, lane.domain, lane.link);
  }
  return writer.take();
}

std::optional<Offer> decode_offer(std::span<const std::byte> bytes) {
  ByteReader reader = open(bytes, Kind::kOffer);
  Offer offer;
  offer.engine = reader.text(kMaxNameBytes);
  const uint32_t lanes = reader.number<uint8_t>();
  if (lanes > kMaxLanes) reader.fail();
  for (uint32_t i = 0; i < lanes && !reader.failed(); ++i) {
    LaneOffer& lane = offer.lanes.emplace_back();
    lane.provider = reader.text(kMaxNameBytes);
    read_link(reader, lane.domains, lane.domain, lane.link);
  }
  if (!reader.complete()) return std::nullopt;
  return offer;
}

Bytes encode(const Answer& answer) {
  ByteWriter writer = begin(Kind::kAnswer);
  writer.text(answer.engine);
  writer.text(answer.provider);
  write_link(writer, answer.domains, answer.domain, answer.link);
  return writer.take();
}

std::optional<Answer> decode_answer(std::span<const std::byte> bytes) {
  ByteReader reader = open(bytes, Kind::kAnswer);
  Answer answer;
  answer.engine = reader.text(kMaxNameBytes);
  answer.provider = reader.text(kMaxNameBytes);
  read_link(reader, answer.domains, answer.domain, answer.link);
  if (!reader.complete()) return std::nullopt;
  return answer;
}

Bytes encode(const RegionDescriptor& descriptor) {
  ByteWriter writer = begin(Kind::kRegion);
  writer.number(static_cast<uint8_t>(descriptor.lanes.size()));
  for (const RegionDescriptor::Lane& lane : descriptor.lanes) {
    writer.text(lane.provider);
    writer.number(static_cast<uint8_t>(lane.domains));
  }
  writer.number(static_cast<uint32_t>(descriptor.regions.size()));
  for (const RegionDescriptor::Region& region : descriptor.regions) {
    writer.number(region.memory);
    writer.number(region.offset);
    writer.number(region.bytes);
  }
  writer.number(static_cast<uint32_t>(descriptor.memories.size()));
  for (const RegionDescriptor::Memory& memory : descriptor.memories) {
    writer.number(memory.base);
    writer.number(memory.bytes);
    for (const std::vector<uint64_t>& rkeys : memory.rkeys) {
      writer.number(static_cast<uint8_t>(rkeys.empty() ? 0 : 1));
      for (const uint64_t rkey : rkeys) writer.number(rkey);
    }
  }
  return writer.take();
}

std::optional<RegionDescriptor> decode_region_descriptor(std::span<const std::byte> bytes) {
  ByteReader reader = open(bytes, Kind::kRegion);
  RegionDescriptor descriptor;
  const uint32_t lanes = reader.number<uint8_t>();
  if (lanes > kMaxLanes) reader.fail();
  for (uint32_t i = 0; i < lanes && !reader.failed(); ++i) {
    RegionDescriptor::Lane& lane = descriptor.lanes.emplace_back();
    lane.provider = reader.text(kMaxNameBytes);
    lane.domains = reader.number<uint8_t>();
    if (lane.domains == 0 || lane.domains > kMaxDomains) reader.fail();
  }
  const auto regions = reader.number<uint32_t>();
  if (regions == 0 || regions > kMaxRegions) reader.fail();
  for (uint32_t i = 0; i < regions && !reader.failed(); ++i) {
    RegionDescriptor::Region& region = descriptor.regions.emplace_back();
    region.memory = reader.number<uint32_t>();
    region.offset = reader.number<uint64_t>();
    region.bytes = reader.number<uint64_t>();
  }
  const auto memories = reader.number<uint32_t>();
  if (memories == 0 || memories > kMaxRegions) reader.fail();
  for (uint32_t i = 0; i < memories && !reader.failed(); ++i) {
    RegionDescriptor::Memory& memory = descriptor.memories.emplace_back();
    memory.base = reader.number<uint64_t>();
    memory.bytes = reader.number<uint64_t>();
    // Offsets are later added to the base without further checks.
    if (memory.bytes == 0 || memory.bytes > std::numeric_limits<uint64_t>::max() - memory.base) reader.fail();
    for (const RegionDescriptor::Lane& lane : descriptor.lanes) {
      std::vector<uint64_t>& rkeys = memory.rkeys.emplace_back();
      const auto taken = reader.number<uint8_t>();
      if (taken > 1) reader.fail();
      for (uint32_t k = 0; taken == 1 && k < lane.domains && !reader.failed(); ++k) {
        rkeys.push_back(reader.number<uint64_t>());
      }
    }
  }
  if (!reader.complete()) return std::nullopt;
  for (const RegionDescriptor::Region& region : descriptor.regions) {
    if (region.memory >= descriptor.memories.size()) return std::nullopt;
    const uint64_t room = descriptor.memories[region.memory].bytes;
    if (region.bytes == 0 || !fits(region.offset, region.bytes, room)) return std::nullopt;
  }
  return descriptor;
}

}  // namespace kvc
