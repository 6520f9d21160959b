// The bytes of the libfabric provider: the cards that the control plane carries, and the messages between the two
// endpoints of a link.
//
// Everything is little-endian. Whatever is decoded here may come from a stranger (an endpoint's address is no secret on
// most fabrics) or a broken peer: decoding checks every length and never reads beyond what it was given.
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

// Raised with every change of a layout below; two ends must agree.
inline constexpr uint16_t kVersion = 2;

// Bounds of what a peer names: an endpoint's address (EFA 32 bytes, shm a name of 256) and a raw key (FI_MR_RAW).
inline constexpr size_t kMaxAddressBytes = 512;
inline constexpr size_t kMaxKeyBytes = 64;

// How a peer's memory is named in a write.
struct RemoteMemory {
  uint64_t address = 0;  // what offset 0 is called: a virtual address or 0, as the peer's provider has it
  uint64_t bytes = 0;
  Bytes key;  // 8 bytes: the key itself; longer: a raw key, to be mapped before use
};

// One end of a link, for the control plane. The offer and the answer are each one card.
struct Card {
  std::string provider;  // libfabric's name, for the words of a refusal
  uint32_t protocol = 0;
  uint32_t protocol_version = 0;
  uint32_t address_format = 0;
  uint64_t secret = 0;  // the offerer's choice; every message of the link shows it
  Machine machine;
  uint32_t pid = 0;
  Bytes address;
  RemoteMemory doorbell;  // where immediates without pages are written

  Bytes encode() const;
  static Result<Card> decode(std::string_view operation, std::span<const std::byte> bytes);
};

enum class MessageKind : uint8_t {
  kHello = 1,    // offerer to acceptor: your address is known here, you may write
  kPing = 2,     // answer with kPong
  kPong = 3,     //
  kBye = 4,      // this end of the link is closing
  kAsk = 5,      // Ask: which memory has this key?
  kTell = 6,     // Tell
  kRevoke = 7,   // u64 rkey: write there no more, and say so when nothing is under way
  kRevoked = 8,  // u64 rkey
  kUser = 9,     // u32 slot, then the user's message
  kTaken = 10,   // u32 slot: its message was taken by the peer's engine
  kSeen = 11,    // u64: so many immediates of this link were read from the completion queue, since its beginning
};

struct Header {
  uint64_t secret = 0;
  uint32_t bytes = 0;  // that follow
  MessageKind kind = MessageKind::kPing;
  uint8_t reserved[3] = {};
};
static_assert(sizeof(Header) == 16);

inline constexpr size_t kMaxBodyBytes = sizeof(uint32_t) + kMaxMessageBytes;
inline constexpr size_t kMaxMessageSize = sizeof(Header) + kMaxBodyBytes;

// The body of messages that are one number.
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
  uint32_t serial = 0;  // which of our questions: messages arrive in any order
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
