// LinkMessage: messages of two transfer engines about one of their links, sent over another of their links.
//
//   kLinkLost    "This end of the link is closed. Close yours, and report what landed." Its numbers are counters.
//   kTallies     The answer to one part. It has one number per counter.
//   kLinkOffer   Its bytes are the domain's offer.
//   kLinkAnswer  Its bytes are the domain's answer. They are empty if the domain cannot answer now.
//   kLinkHello   The first message over the new link. It has no contents.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/message.h"
#include "lane/domain.h"

namespace kvc {

struct LinkMessage {
  // Most counters in one message: 4,000 of the 4,096 bytes. More counters are split into parts.
  static constexpr size_t kMaxNumbers = 1000;
  static constexpr size_t kHeaderBytes = 1 + 1 + 4 + 2 + 2 + 4;
  static constexpr size_t kMaxBytes = kMaxMessageBytes - kHeaderBytes;
  // Flag in the number of an answer: the counter was released (its pages may have a new owner), or its slot has a new
  // owner.
  static constexpr uint32_t kReleased = 1U << 31;
  // Flag: the receiver has used pages on the strength of a count, or may have (CounterSets::acted_on()).
  static constexpr uint32_t kActedOn = 1U << 30;
  static constexpr uint32_t kUnknown = UINT32_MAX;

  MessageTag tag{};
  uint8_t link = 0;    // its index in the list of links, the same on both sides
  uint32_t epoch = 0;  // Link::epoch
  uint16_t part = 0;
  std::vector<uint32_t> numbers{};
  Bytes bytes{};
};

Bytes encode(const LinkMessage& message);
// Returns no value unless `bytes` is a well-formed message with one of these tags.
std::optional<LinkMessage> decode_link_message(std::span<const std::byte> bytes);

}  // namespace kvc
