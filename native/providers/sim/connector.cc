#include "providers/sim/connector.h"

#include <utility>

#include "base/byte_codec.h"
#include "base/random.h"

namespace kvc::sim {

Result<std::unique_ptr<Registration>> SimConnector::register_memory(const MemoryRange& range) {
  return std::make_unique<Registration>(range, random_key());
}

Result<Bytes> SimConnector::offer(LinkId id) {
  if (!nic_->up.load()) return sim_error(ErrorCode::kSystem, "offer", "the NIC " + nic_->device + " is down");
  auto gate = std::make_shared<Gate>();
  gate->inbox[0] = inbox_;
  gate->nic[0] = nic_;
  gate->link[0] = id;
  const uint64_t secret = random_key();
  fabric_->publish(secret, gate);
  offers_.emplace(id, Offered{secret, std::make_unique<Link>(std::move(gate), 0)});
  ByteWriter writer;
  writer.number(fabric_->token());
  writer.number(secret);
  return writer.take();
}

Result<Connector::Accepted> SimConnector::accept(LinkId id, std::span<const std::byte> offer) {
  ByteReader reader(offer);
  const auto token = reader.number<uint64_t>();
  const auto secret = reader.number<uint64_t>();
  if (!reader.complete()) return sim_error(ErrorCode::kInvalidArgument, "accept", "not an offer of a sim domain");
  if (token != fabric_->token()) {
    return sim_error(ErrorCode::kNotReachable, "accept", "the peer is in another fabric than " + name_);
  }
  std::shared_ptr<Gate> gate = fabric_->take(secret);
  if (gate == nullptr) return sim_error(ErrorCode::kRefused, "accept", "this offer was already used or withdrawn");
  {
    const std::lock_guard lock(gate->mutex);
    gate->inbox[1] = inbox_;
    gate->link[1] = id;
    gate->nic[1] = nic_;
  }
  auto link = std::make_unique<Link>(gate, 1);
  if (!fabric_->join(gate)) return sim_error(ErrorCode::kSystem, "accept", "a NIC is down, here or at the peer");
  ByteWriter writer;
  writer.number(secret);
  return Accepted{writer.take(), std::move(link)};
}

Result<std::unique_ptr<LinkEnd>> SimConnector::complete(LinkId id, std::span<const std::byte> answer) {
  auto node = offers_.extract(id);
  if (node.empty()) return sim_error(ErrorCode::kPeerDown, "complete", "no such offer");
  ByteReader reader(answer);
  const auto secret = reader.number<uint64_t>();
  if (!reader.complete() || secret != node.mapped().secret) {
    fabric_->take(node.mapped().secret);
    return sim_error(ErrorCode::kInvalidArgument, "complete", "not the answer to this offer");
  }
  return std::unique_ptr<LinkEnd>(std::move(node.mapped().link));
}

void SimConnector::withdraw(LinkId id) {
  const auto node = offers_.extract(id);
  if (!node.empty()) fabric_->take(node.mapped().secret);
}

}  // namespace kvc::sim
