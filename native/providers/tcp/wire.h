// The bytes of the tcp provider: what it hands to the control plane and what it writes to its sockets.
//
// A connection carries  dialing end:    Hello   frame frame ...
//                       listening end:  Welcome frame frame ...
// and a frame is one of  write:   FrameHeader, `count` target offsets of 8 bytes, then the pages back to back
//                                 (an immediate alone has pages of 0 bytes, and no offsets);
//                        message: FrameHeader, `count` bytes;
//                        ack:     FrameHeader alone (every header acknowledges, so an ack is only sent for want of one);
//                        refusal: FrameHeader, `count` bytes of text. Of a key that is unknown, or was revoked: of that
//                                 write alone, which is acknowledged after it. Any other: the connection ends after it.
// Everything is little-endian and has one fixed layout. Whatever is decoded here came from a stranger or from a
// peer that may be broken: decoding checks every length and never reads beyond what it was given.
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

// Raised with every change of a layout below, or of what a field means; two ends must agree.
inline constexpr uint16_t kVersion = 4;

// --- Control plane.

// At most this many connections make one link: beyond 16, nothing is left to win from more flows on one NIC, and a
// bound keeps a hostile offer from opening thousands of sockets.
inline constexpr uint16_t kMaxConnections = 16;

// Where and how to dial the offering domain. Who shows its secrets is the process that the control plane talked to.
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

// How many connections the accepting domain dials.
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
  uint16_t index = 0;  // which of the link's connections this is
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
  static constexpr uint32_t kMagic = 0x3146564b;  // "KVF1": a connection that lost step ends here
  uint32_t magic = kMagic;
  FrameType type = FrameType::kAck;
  uint8_t counted = 0;        // write: 1 if `value` is an immediate
  uint16_t count = 0;         // write: pages; refusal: bytes of text; message: its bytes
  uint64_t acknowledged = 0;  // writes of the other direction that are in memory here, or refused, since it began
  uint64_t sequence = 0;      // write: its number on this connection, from 1; refusal: the number of the refused write
  uint64_t rkey = 0;
  uint64_t page_bytes = 0;
  uint32_t value = 0;           // write: the immediate; refusal: an ErrorCode; message: its slot, one of the link's
  uint32_t messages_taken = 0;  // a bit a slot: it changes with each message of this connection that is taken
};
static_assert(sizeof(FrameHeader) == 48 && std::is_trivially_copyable_v<FrameHeader>);

inline constexpr uint32_t kMaxPages = Immediate::kMaxMultiplicity;
// 1 TiB: no page is as long, and 64 of them are far from overflowing 64 bits.
inline constexpr uint64_t kMaxPageBytes = 1ULL << 40;
// A line of text for the peer's log.
inline constexpr size_t kMaxRefusalText = 256;
// The longest part of a frame that stands before its pages and that is built here. A message lies behind its header in
// a buffer of its own.
inline constexpr size_t kMaxHeadBytes = sizeof(FrameHeader) + kMaxPages * sizeof(uint64_t);
static_assert(sizeof(FrameHeader) + kMaxRefusalText <= kMaxHeadBytes);

// Bytes of header, offsets, text and message: all of a frame but its pages. Valid for a header that malformed() passed.
size_t head_bytes(const FrameHeader& header) noexcept;
// Why no peer of ours can have sent this header; nullopt if it may have.
std::optional<std::string> malformed(const FrameHeader& header);

// A refusal's code and text, as far as a stranger's words may go into our errors: known codes, printable characters.
ErrorCode refusal_code(uint32_t value) noexcept;
std::string printable(std::string_view text);

// An Error of this provider.
Error tcp_error(ErrorCode code, std::string_view operation, std::string message);

}  // namespace kvc::tcp
