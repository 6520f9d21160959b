// The first byte of a message between transfer engines (Domain::send), which says what the message is for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lane/domain.h"

namespace kvc {

enum class MessageTag : uint8_t {
  // A message of the user: a header (tag, sequence), then the bytes.
  kUser = 0,
  // All transfers to the receiver have ended, and no new one will be opened (peer_disconnects.h).
  kGoodbye = 1,
  kLinkLost = 2,  // failover between the links of one peer (link_keeper.h)
  kTallies = 3,
  kLinkOffer = 4,  // making a link, for the first time or again
  kLinkAnswer = 5,
  kLinkHello = 6,
  kLinksWanted = 7,  // request to make the links that were not made so far, because something is to be written
};

// Size of the tag and the sequence number. The number identifies a message that was sent again over another link.
inline constexpr size_t kUserHeaderBytes = 1 + sizeof(uint32_t);

// The longest message of a user, in bytes.
inline constexpr size_t kMaxUserMessageBytes = kMaxMessageBytes - kUserHeaderBytes;

}  // namespace kvc
