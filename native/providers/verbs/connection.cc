#include "providers/verbs/connection.h"

#include <utility>

namespace kvc::verbs {

Result<std::unique_ptr<Connection>> Connection::create(const DomainResources& resources, bool offering) {
  Result<std::shared_ptr<QueuePair>> writes = QueuePair::create(
      resources, *resources.write_receives, resources.tuning.write_slots, abi::IBV_ACCESS_REMOTE_WRITE);
  if (!writes) return writes.error();
  // The peer cannot write over the queue pair for messages, so it may outlive the link to send a goodbye.
  Result<std::shared_ptr<QueuePair>> messages =
      QueuePair::create(resources, *resources.message_receives, resources.tuning.message_slots, 0);
  if (!messages) return messages.error();
  return std::unique_ptr<Connection>(
      new Connection(resources, offering, std::move(writes.value()), std::move(messages.value())));
}

Status Connection::connect(const Path& path, const Endpoint& peer) {
  peer_key_half_ = peer.key_half;
  if (Status connected = writes_->connect(path, peer.writes); !connected) return connected;
  return messages_->connect(path, peer.messages);
}

Endpoint Connection::endpoint(LinkId offered, const Address& address) const {
  return Endpoint{.link = offered,
                  .key_half = key_half_,
                  .address = address,
                  .writes = writes_->end(),
                  .messages = messages_->end()};
}

}  // namespace kvc::verbs
