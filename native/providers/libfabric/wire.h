// The bytes of the libfabric provider: the cards that the control plane carries, and the messages between the two
// endpoints of a link.
//
// Everything is little-endian. Decoded bytes may come from a stranger (an endpoint's address is no secret on most
// fabrics) or a broken peer: decoding checks every length and never reads beyond its input.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/byte_codec.h"
#include "base/error.h"
#include "lane/domain.h"
#include "providers/libfabric/machine.h"

namespace kvc::libfabric {

static_assert(std::endian::native == std::endian::little, "the wire format is a little-endian host's memory layout");

// Raised with every change of a layout below. Both ends must agree.
inline constexpr uint16_t kVersion = 2;

// Limits for a peer's fields: an endpoint's address (EFA 32 bytes, shm a name of 256) and a raw key (FI_MR_RAW).
inline constexpr size_t kMaxAddressBytes = 512;
inline constexpr size_t kMaxKeyBytes = 64;

// The description of a peer's memory for writes.
struct RemoteMemory {
  uint64_t address = 0;  // the peer's address of offset 0: a virtual address or 0, depending on the peer's provider
  uint64_t bytes = 0;
  Bytes key;  // 8 bytes: the key itself; longer: a raw key, to be mapped before use
};

// One end of a link, for the control plane. The offer and the answer are one card each.
struct Card {
  std::string provider;  // libfabric's name, for the text of a refusal
  uint32_t protocol = 0;
  uint32_t protocol_version = 0;
  uint32_t address_format = 0;
  uint64_t secret = 0;  // chosen by the offerer; every message of the link contains it
  Machine machine;
  uint32_t pid = 0;
  Bytes address;
  RemoteMemory doorbell;  // the memory to which immediates without pages are written

  Bytes encode() const;
  static Result<Card> decode(std::string_view operation, std::span<const std::byte> bytes);
};

enum class MessageKind : uint8_t {
  kHello = 1,    // offerer to acceptor: your address is known here, you may write
  kPing = 2,     // answer with kPong
  kPong = 3,     //
  kBye = 4,      // this end of the link is closing
  kAsk = 5,      // Ask: request for the memory of this key
  kTell = 6,     // Tell: the answer to kAsk
  kRevoke = 7,   // u64 rkey: do not write there any more, and answer with kRevoked when no write is in flight
  kRevoked = 8,  // u64 rkey
  kUser = 9,     // u32 slot, then the user's message
  kTaken = 10,   // u32 slot: the receiver's engine has taken its message
  kSeen = 11,  // u64: the number of this link's immediates that were read from the completion queue since its beginning
};

struct Header {
  uint64_t secret = 0;
  uint32_t bytes = 0;  // bytes that follow
  MessageKind kind = MessageKind::kPing;
  uint8_t reserved[3] = {};
};
static_assert(sizeof(Header) == 16);

inline constexpr size_t kMaxBodyBytes = sizeof(uint32_t) + kMaxMessageBytes;
inline constexpr size_t kMaxMessageSize = sizeof(Header) + kMaxBodyBytes;

// Returns the body of a message that is one number.
template <typename Number>
Bytes encode_number(Number number) {
  ByteWriter writer;
  writer.number(number);
  return writer.take();
}
template <typename Number>
std::optional<Number> decode_number(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  const auto number = reader.number<Number>();
  if (!reader.complete()) return std::nullopt;
  return number;
}

struct Ask {
  uint32_t serial = 0;  // number of the request, because messages arrive in any order
  uint64_t rkey = 0;
  Bytes encode() const;
  static Result<Ask> decode(std::span<const std::byte> bytes);
};
struct Tell {
  uint32_t serial = 0;
  uint64_t rkey = 0;
  bool known = false;
  RemoteMemory memory;
  Bytes encode() const;
  static Result<Tell> decode(std::span<const std::byte> bytes);
};

}  // namespace kvc::libfabric
