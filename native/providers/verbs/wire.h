// The bytes of the verbs provider: the offers and answers of the control plane, and the immediates and ids in work
// requests.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"
#include "lane/domain.h"

namespace kvc::verbs {

static_assert(std::endian::native == std::endian::little, "immediates are turned around for a little-endian host");

using Gid = std::array<uint8_t, 16>;

// Immediates and pkeys are big-endian in every structure of the library.
constexpr uint32_t big_endian(uint32_t value) noexcept { return __builtin_bswap32(value); }
constexpr uint16_t big_endian(uint16_t value) noexcept { return __builtin_bswap16(value); }

// Formats a GID: "10.77.0.1" for an IPv4 address in it, else IPv6 notation.
std::string to_string(const Gid& gid);
bool is_ipv4(const Gid& gid) noexcept;
bool is_link_local(const Gid& gid) noexcept;

// The address of a port, as its peers need it.
struct Address {
  uint8_t link_layer = 0;  // IBV_LINK_LAYER_*
  uint8_t mtu = 0;         // IBV_MTU_*
  uint8_t gid_type = 0;    // IBV_GID_TYPE_*
  uint16_t lid = 0;        // InfiniBand
  Gid gid{};
};

// One queue pair: its number, and the packet sequence number with which its send queue begins.
struct QueueEnd {
  uint32_t number = 0;
  uint32_t psn = 0;
};

// One end of a link: the offer, or the answer, which has the same form.
struct Endpoint {
  LinkId link = 0;        // the offering side's id of the link, in both
  uint32_t key_half = 0;  // the upper half of all keys of this domain
  Address address;
  QueueEnd writes;
  QueueEnd messages;

  Bytes encode() const;
  // Returns kInvalidArgument for bytes that no correct peer sends.
  static Result<Endpoint> decode(std::span<const std::byte> bytes, std::string_view operation);
};

// The immediate of every send on the queue pair for messages. It contains the kind of the send.
struct Control {
  enum class Kind : uint16_t {
    kHello = 0x4b01,    // the offering side is ready to receive
    kMessage = 0x4b02,  // value: its slot, 0 to 15; the bytes are the message
    kTaken = 0x4b03,    // value: a bit for each slot whose message was taken
    kGoodbye = 0x4b04,  // this end of the link is gone; value: how many immediates have landed here, modulo 2^16
  };

  Kind kind = Kind::kHello;
  uint16_t value = 0;

  constexpr uint32_t encode() const noexcept { return static_cast<uint32_t>(kind) << 16 | value; }
  // `kind` may be an unknown value, because a peer sent it.
  static constexpr Control decode(uint32_t raw) noexcept {
    return {static_cast<Kind>(raw >> 16), static_cast<uint16_t>(raw)};
  }
};

// Our own id of every work request. After an error it is the only field of a completion that identifies the request. No
// two requests have the same id at a time: it contains the whole LinkId, which is never used again. A queue pair has at
// most 2^14 posts in flight, and the sequence distinguishes 2^30.
struct WorkRequestId {
  enum class Kind : uint8_t { kWrite, kMessage, kWriteReceive, kMessageReceive };
  static constexpr uint32_t kSequenceBits = 30;
  static constexpr uint32_t kSequenceMask = (1U << kSequenceBits) - 1;

  Kind kind = Kind::kWrite;
  LinkId link = 0;        // for sends; receives are shared
  uint32_t sequence = 0;  // sends: the number of the post on its queue pair; receives: the slot

  constexpr uint64_t encode() const noexcept {
    return static_cast<uint64_t>(kind) << 62 | static_cast<uint64_t>(link) << kSequenceBits |
           (sequence & kSequenceMask);
  }
  static constexpr WorkRequestId decode(uint64_t raw) noexcept {
    return {static_cast<Kind>(raw >> 62), static_cast<LinkId>(raw >> kSequenceBits),
            static_cast<uint32_t>(raw) & kSequenceMask};
  }
};

}  // namespace kvc::verbs
