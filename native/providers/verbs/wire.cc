#include "providers/verbs/wire.h"

#include <arpa/inet.h>

#include <algorithm>

#include "base/byte_codec.h"
#include "providers/verbs/library.h"

namespace kvc::verbs {

namespace {

constexpr uint32_t kMagic = 0x3256564b;  // "KVV2": raised with every change of the layout below, or of Control
constexpr uint32_t kMax24 = 0xFFFFFF;    // queue pair numbers and PSNs have 24 bits

void write(ByteWriter& writer, const QueueEnd& end) {
  writer.number(end.number);
  writer.number(end.psn);
}

QueueEnd read_end(ByteReader& reader) {
  QueueEnd end;
  end.number = reader.number<uint32_t>();
  end.psn = reader.number<uint32_t>();
  // Every port uses queue pairs 0 and 1 for management.
  if (end.number <= 1 || end.number > kMax24 || end.psn > kMax24) reader.fail();
  return end;
}

}  // namespace

bool is_ipv4(const Gid& gid) noexcept {
  return std::all_of(gid.begin(), gid.begin() + 10, [](uint8_t byte) { return byte == 0; }) && gid[10] == 0xFF &&
         gid[11] == 0xFF;
}

bool is_link_local(const Gid& gid) noexcept { return gid[0] == 0xFE && (gid[1] & 0xC0) == 0x80; }

std::string to_string(const Gid& gid) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (is_ipv4(gid)) {
    inet_ntop(AF_INET, gid.data() + 12, text.data(), text.size());
  } else {
    inet_ntop(AF_INET6, gid.data(), text.data(), text.size());
  }
  return text.data();
}

Bytes Endpoint::encode() const {
  ByteWriter writer;
  writer.number(kMagic);
  writer.number(link);
  writer.number(key_half);
  writer.number(address.link_layer);
  writer.number(address.mtu);
  writer.number(address.gid_type);
  writer.number(address.lid);
  for (const uint8_t byte : address.gid) writer.number(byte);
  write(writer, writes);
  write(writer, messages);
  return writer.take();
}

Result<Endpoint> Endpoint::decode(std::span<const std::byte> bytes, std::string_view operation) {
  ByteReader reader(bytes);
  Endpoint end;
  if (reader.number<uint32_t>() != kMagic) reader.fail();
  end.link = reader.number<uint32_t>();
  end.key_half = reader.number<uint32_t>();
  end.address.link_layer = reader.number<uint8_t>();
  end.address.mtu = reader.number<uint8_t>();
  end.address.gid_type = reader.number<uint8_t>();
  end.address.lid = reader.number<uint16_t>();
  for (uint8_t& byte : end.address.gid) byte = reader.number<uint8_t>();
  end.writes = read_end(reader);
  end.messages = read_end(reader);
  const Address& address = end.address;
  const bool sound =
      (address.link_layer == abi::IBV_LINK_LAYER_INFINIBAND || address.link_layer == abi::IBV_LINK_LAYER_ETHERNET) &&
      address.mtu >= abi::IBV_MTU_256 && address.mtu <= abi::IBV_MTU_4096 &&
      address.gid_type <= abi::IBV_GID_TYPE_ROCE_V2;
  if (!reader.complete() || !sound) {
    return verbs_error(ErrorCode::kInvalidArgument, operation, "not from a verbs domain of this version");
  }
  return end;
}

}  // namespace kvc::verbs
