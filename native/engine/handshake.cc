#include "engine/handshake.h"

#include <limits>

#include "engine/byte_codec.h"

namespace kvc {

namespace {

constexpr uint32_t kMagic = 0x4943564B;  // "KVCI" in memory
constexpr uint8_t kVersion = 1;
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

void write_links(ByteWriter& writer, uint32_t domains, const std::vector<Bytes>& links) {
  writer.number(static_cast<uint8_t>(domains));
  writer.number(static_cast<uint8_t>(links.size()));
  for (const Bytes& link : links) writer.blob(link);
}

// At least one domain and one link: a lane with neither leads nowhere.
void read_links(ByteReader& reader, uint32_t& domains, std::vector<Bytes>& links) {
  domains = reader.number<uint8_t>();
  const uint32_t count = reader.number<uint8_t>();
  if (domains == 0 || domains > kMaxDomains || count == 0 || count > kMaxDomains) reader.fail();
  for (uint32_t i = 0; i < count && !reader.failed(); ++i) {
    const std::span<const std::byte> link = reader.blob(kMaxLinkBytes);
    links.emplace_back(link.begin(), link.end());
  }
}

}  // namespace

Bytes encode(const Offer& offer) {
  ByteWriter writer = begin(Kind::kOffer);
  writer.text(offer.engine);
  writer.number(static_cast<uint8_t>(offer.lanes.size()));
  for (const LaneOffer& lane : offer.lanes) {
    writer.text(lane.provider);
    write_links(writer, lane.domains, lane.links);
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
    read_links(reader, lane.domains, lane.links);
  }
  if (!reader.complete()) return std::nullopt;
  return offer;
}

Bytes encode(const Answer& answer) {
  ByteWriter writer = begin(Kind::kAnswer);
  writer.text(answer.engine);
  writer.text(answer.provider);
  write_links(writer, answer.domains, answer.links);
  return writer.take();
}

std::optional<Answer> decode_answer(std::span<const std::byte> bytes) {
  ByteReader reader = open(bytes, Kind::kAnswer);
  Answer answer;
  answer.engine = reader.text(kMaxNameBytes);
  answer.provider = reader.text(kMaxNameBytes);
  read_links(reader, answer.domains, answer.links);
  if (!reader.complete()) return std::nullopt;
  return answer;
}

Bytes encode(const RegionDescriptor& descriptor) {
  ByteWriter writer = begin(Kind::kRegion);
  writer.number(descriptor.base);
  writer.number(descriptor.bytes);
  writer.number(static_cast<uint8_t>(descriptor.lanes.size()));
  for (const RegionDescriptor::Lane& lane : descriptor.lanes) {
    writer.text(lane.provider);
    writer.number(static_cast<uint8_t>(lane.rkeys.size()));
    for (const uint64_t rkey : lane.rkeys) writer.number(rkey);
  }
  return writer.take();
}

std::optional<RegionDescriptor> decode_region_descriptor(std::span<const std::byte> bytes) {
  ByteReader reader = open(bytes, Kind::kRegion);
  RegionDescriptor descriptor;
  descriptor.base = reader.number<uint64_t>();
  descriptor.bytes = reader.number<uint64_t>();
  // Offsets are added to the base without further checks.
  if (descriptor.bytes == 0 || descriptor.bytes > std::numeric_limits<uint64_t>::max() - descriptor.base) reader.fail();
  const uint32_t lanes = reader.number<uint8_t>();
  if (lanes > kMaxLanes) reader.fail();
  for (uint32_t i = 0; i < lanes && !reader.failed(); ++i) {
    RegionDescriptor::Lane& lane = descriptor.lanes.emplace_back();
    lane.provider = reader.text(kMaxNameBytes);
    const uint32_t rkeys = reader.number<uint8_t>();
    if (rkeys > kMaxDomains) reader.fail();
    for (uint32_t k = 0; k < rkeys && !reader.failed(); ++k) lane.rkeys.push_back(reader.number<uint64_t>());
  }
  if (!reader.complete()) return std::nullopt;
  return descriptor;
}

}  // namespace kvc
