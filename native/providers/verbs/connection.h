// Connection: the two queue pairs between this domain and one domain of a peer, one for writes and one for messages.
// The connector passes it to the domain.
#pragma once

#include <cstdint>
#include <memory>

#include "lane/domain.h"
#include "providers/verbs/domain_resources.h"
#include "providers/verbs/queue_pair.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs {

// Created, connected and destroyed on the control thread; all three block. The domain takes over its queue pairs.
class Connection final : public LinkEnd {
 public:
  // Creates both queue pairs in INIT. If `offering`, this side sends the hello: the accepting side may not post before
  // it.
  static Result<std::unique_ptr<Connection>> create(const DomainResources& resources, bool offering);
  // Connects both queue pairs: they receive from the peer and may send.
  Status connect(const Path& path, const Endpoint& peer);
  // Returns our end, in the form that the peer needs. `offered` is the offering side's id of the link.
  Endpoint endpoint(LinkId offered, const Address& address) const;

  bool offering() const noexcept { return offering_; }
  uint32_t peer_key_half() const noexcept { return peer_key_half_; }
  const std::shared_ptr<QueuePair>& writes() const noexcept { return writes_; }
  const std::shared_ptr<QueuePair>& messages() const noexcept { return messages_; }

 private:
  Connection(const DomainResources& resources, bool offering, std::shared_ptr<QueuePair> writes,
             std::shared_ptr<QueuePair> messages)
      : offering_(offering),
        key_half_(resources.key_half),
        writes_(std::move(writes)),
        messages_(std::move(messages)) {}

  const bool offering_;
  const uint32_t key_half_;
  const std::shared_ptr<QueuePair> writes_;
  const std::shared_ptr<QueuePair> messages_;
  uint32_t peer_key_half_ = 0;
};

}  // namespace kvc::verbs
