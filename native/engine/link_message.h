// LinkMessage: what the two ends of a peer say to each other about one of their links, over another one of them.
//
//   kLinkLost    numbers: counters             "my end of this link is closed: close yours. What landed over it?"
//   kTallies     numbers: one for each of them  the answer, of the same part
//   kLinkOffer   bytes: the domain's offer
//   kLinkAnswer  bytes: the domain's answer, empty where there is none now
//   kLinkHello   nothing: the first message over the new link
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/message.h"
#include "lane/domain.h"

namespace kvc {

struct LinkMessage {
  // Of counters in one message: 4,000 of the 4,096 bytes. More are asked for in parts.
  static constexpr size_t kMaxNumbers = 1000;
  static constexpr size_t kHeaderBytes = 1 + 1 + 4 + 2 + 2 + 4;
  static constexpr size_t kMaxBytes = kMaxMessageBytes - kHeaderBytes;
  // In an answer's number: the counter was released (its pages may have a new owner), or its slot has a new owner.
  static constexpr uint32_t kReleased = 1U << 31;
  // Its receiver has acted on a count of it, or may have: CounterSets::acted_on().
  static constexpr uint32_t kActedOn = 1U << 30;
  static constexpr uint32_t kUnknown = UINT32_MAX;

  MessageTag tag{};
  uint8_t link = 0;    // its place in the list of links, the same on both sides
  uint32_t epoch = 0;  // Link::epoch
  uint16_t part = 0;
  std::vector<uint32_t> numbers{};
  Bytes bytes{};
};

Bytes encode(const LinkMessage& message);
// Nothing: not a well-formed message of one of these tags.
std::optional<LinkMessage> decode_link_message(std::span<const std::byte> bytes);

}  // namespace kvc
