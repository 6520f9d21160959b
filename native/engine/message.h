// What engines say to each other in small messages (Domain::send). The first byte says whose a message is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lane/domain.h"

namespace kvc {

enum class MessageTag : uint8_t {
  kUser = 0,      // of the engine's user: UserHeader, then its bytes
  kGoodbye = 1,   // all transfers to you have ended, and no new one will be opened (peer_disconnects.h)
  kLinkLost = 2,  // failover between links of one peer (link_keeper.h)
  kTallies = 3,
  kLinkOffer = 4,  // making a link, the first time or anew
  kLinkAnswer = 5,
  kLinkHello = 6,
  kLinksWanted = 7,  // make the links that were not made so far: there is something to write
};

// Tag, and a sequence by which a message that was sent again over another link is known for what it is.
inline constexpr size_t kUserHeaderBytes = 1 + sizeof(uint32_t);

// The longest message of a user.
inline constexpr size_t kMaxUserMessageBytes = kMaxMessageBytes - kUserHeaderBytes;

}  // namespace kvc
