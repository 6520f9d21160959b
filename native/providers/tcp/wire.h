// The bytes of the tcp provider: the offers and answers of its control plane, and the frames on its sockets.
//
//     A connection carries  dialing end:    Hello   frame frame ...
//                           listening end:  Welcome frame frame ...
//     and a frame is one of
//       write:   FrameHeader, `count` target offsets of 8 bytes, then the pages back to back
//                (an immediate alone has pages of 0 bytes, and no offsets);
//       message: FrameHeader, `count` bytes;
//       ack:     FrameHeader alone (every header acknowledges: an ack is sent if no other frame is);
//       refusal: FrameHeader, `count` bytes of text. If the key is unknown or was revoked, it refuses that write
//                alone, which is acknowledged after it. Else the connection ends after it.
//
// Everything is little-endian and has one fixed layout. All decoded bytes came from a stranger or from a peer that may
// be broken: decoding checks every length and never reads beyond its input.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/error.h"
#include "base/random.h"
#include "lane/domain.h"
#include "lane/immediate.h"

namespace kvc::tcp {

static_assert(std::endian::native == std::endian::little,
              "the wire format is the memory layout of a little-endian host");

// Raised with every change of a layout below, or of a field's meaning. Both ends must agree.
inline constexpr uint16_t kVersion = 4;

// --- Control plane.

// The most connections of one link. Beyond 16, more flows on one NIC gain nothing, and the bound keeps a hostile offer
// from opening thousands of sockets.
inline constexpr uint16_t kMaxConnections = 16;

// The address of the offering domain and the secrets of the link. A process that shows a secret is the process that the
// control plane talked to.
struct Offer {
  std::string address;  // numeric, IPv4 or IPv6
  uint16_t port = 0;
  LinkId link = 0;  // the offering side's id of the link
  uint16_t connections = 0;
  Secret dialer;    // the dialing end shows it in Hello
  Secret listener;  // the listening end shows it in Welcome

  Bytes encode() const;
  static Result<Offer> decode(std::span<const std::byte> bytes);
};

// The number of connections that the accepting domain dials.
struct Answer {
  LinkId link = 0;  // as in the offer
  uint16_t connections = 0;

  Bytes encode() const;
  static Result<Answer> decode(std::span<const std::byte> bytes);
};

// --- Opening of a connection.

struct Hello {
  static constexpr uint32_t kMagic = 0x3148564b;  // "KVH1"
  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  uint16_t index = 0;  // index of the connection within its link
  LinkId link = 0;
  uint32_t reserved = 0;
  Secret secret;
};
static_assert(sizeof(Hello) == 32 && std::is_trivially_copyable_v<Hello>);

struct Welcome {
  static constexpr uint32_t kMagic = 0x3157564b;  // "KVW1"
  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  uint16_t index = 0;
  Secret secret;
};
static_assert(sizeof(Welcome) == 24 && std::is_trivially_copyable_v<Welcome>);

// --- Frames.

enum class FrameType : uint8_t { kWrite = 1, kAck = 2, kRefusal = 3, kMessage = 4 };

struct FrameHeader {
  static constexpr uint32_t kMagic = 0x3146564b;  // "KVF1": a connection that lost its position in the stream ends here
  uint32_t magic = kMagic;
  FrameType type = FrameType::kAck;
  uint8_t counted = 0;        // write: 1 if `value` is an immediate
  uint16_t count = 0;         // number of pages (write), or of bytes (refusal, message)
  uint64_t acknowledged = 0;  // the other direction's writes that are in memory here or refused, since it began
  uint64_t sequence = 0;      // write: its number on this connection, from 1; refusal: the refused write's number
  uint64_t rkey = 0;
  uint64_t page_bytes = 0;
  uint32_t value = 0;           // the immediate (write), an ErrorCode (refusal) or the slot (message)
  uint32_t messages_taken = 0;  // a bit per slot, which flips when a message of this connection is taken
};
static_assert(sizeof(FrameHeader) == 48 && std::is_trivially_copyable_v<FrameHeader>);

inline constexpr uint32_t kMaxPages = Immediate::kMaxMultiplicity;
// 1 TiB. No page is as long, and 64 such pages are far from overflowing 64 bits.
inline constexpr uint64_t kMaxPageBytes = 1ULL << 40;
// One line of text for the peer's log.
inline constexpr size_t kMaxRefusalText = 256;
// The longest part of a frame that precedes its pages and that is built here. A message lies behind its header in its
// own buffer.
inline constexpr size_t kMaxHeadBytes = sizeof(FrameHeader) + kMaxPages * sizeof(uint64_t);
static_assert(sizeof(FrameHeader) + kMaxRefusalText <= kMaxHeadBytes);

// Returns the bytes of header, offsets, text and message: all of a frame but its pages. Only for a header that
// malformed() passed.
size_t head_bytes(const FrameHeader& header) noexcept;
// Returns the reason for which a correct peer cannot have sent this header; nullopt if it can.
std::optional<std::string> malformed(const FrameHeader& header);

// A refusal's code and text, restricted to what may appear in our errors: known codes and printable characters.
ErrorCode refusal_code(uint32_t value) noexcept;
std::string printable(std::string_view text);

// Returns an Error of this provider.
Error tcp_error(ErrorCode code, std::string_view operation, std::string message);

}  // namespace kvc::tcp
