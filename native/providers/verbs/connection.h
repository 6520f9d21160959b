// Connection: the two queue pairs between this domain and one domain of a peer, one for writes and one for messages, as
// the connector hands them over.
#pragma once

#include <cstdint>
#include <memory>

#include "lane/domain.h"
#include "providers/verbs/queue_pair.h"
#include "providers/verbs/queues.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs {

// Made, connected and ended on the control thread, all of which blocks; what it holds is the domain's to take.
class Connection final : public LinkEnd {
 public:
  // Both in INIT. `offering`: this side says hello, as the other one may not post before.
  static Result<std::unique_ptr<Connection>> create(const Queues& queues, bool offering);
  // Both take in what the peer sends and may send.
  Status connect(const Path& path, const Endpoint& peer);
  // Our end, as the peer needs it; `offered` is the offering side's id of the link.
  Endpoint endpoint(LinkId offered, const Address& address) const;

  bool offering() const noexcept { return offering_; }
  uint32_t peer_key_half() const noexcept { return peer_key_half_; }
  const std::shared_ptr<QueuePair>& writes() const noexcept { return writes_; }
  const std::shared_ptr<QueuePair>& messages() const noexcept { return messages_; }

 private:
  Connection(const Queues& queues, bool offering, std::shared_ptr<QueuePair> writes,
             std::shared_ptr<QueuePair> messages)
      : offering_(offering), key_half_(queues.key_half), writes_(std::move(writes)), messages_(std::move(messages)) {}

  const bool offering_;
  const uint32_t key_half_;
  const std::shared_ptr<QueuePair> writes_;
  const std::shared_ptr<QueuePair> messages_;
  uint32_t peer_key_half_ = 0;
};

}  // namespace kvc::verbs
