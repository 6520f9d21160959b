#include "providers/libfabric/connector.h"

#include <unistd.h>

#include <algorithm>

#include "base/random.h"
#include "providers/libfabric/machine.h"
#include "providers/libfabric/region.h"
#include "providers/libfabric/wire.h"

namespace kvc::libfabric {

std::string LibfabricConnector::description() const {
  return "libfabric " + device_->description() +
         (device_->waits_by_descriptor() ? "" : ", which has no descriptor to wait on: polled every 50 us to 1 ms");
}

DomainLimits LibfabricConnector::limits() const {
  DomainLimits limits;
  limits.page_bytes = std::min(limits.page_bytes, device_->max_write());  // tcp reports 2^64 - 1
  return limits;
}

Result<std::unique_ptr<Registration>> LibfabricConnector::register_memory(const MemoryRange& range) {
  Memory memory;
  if (!device_->memory_per_endpoint()) {
    auto registered = device_->register_memory(range.base, range.bytes, kRegionAccess, nullptr);
    if (!registered) return registered.error();
    memory = std::move(registered.value());
  }
  return std::unique_ptr<Registration>(std::make_unique<Region>(device_, range, std::move(memory)));
}

Status LibfabricConnector::check(std::string_view operation, const Card& peer) const {
  const fi_info& info = device_->info();
  const std::string pair = "the peer has " + peer.provider + " and this side " + device_->provider();
  if (peer.protocol != info.ep_attr->protocol || peer.address_format != info.addr_format) {
    return fabric_error(ErrorCode::kRefused, std::string(operation),
                        pair + ", which cannot communicate: configure the same device on both");
  }
  if (peer.protocol_version != info.ep_attr->protocol_version) {
    return fabric_error(ErrorCode::kRefused, std::string(operation),
                        pair + " in versions that differ (" + std::to_string(peer.protocol_version) + " and " +
                            std::to_string(info.ep_attr->protocol_version) + "): install the same libfabric on both");
  }
  if (device_->is_local() && !Machine::current().shares_memory(peer.machine)) {
    return fabric_error(ErrorCode::kNotReachable, std::string(operation),
                        "the peer does not share this machine's /dev/shm and processes");
  }
  if (device_->is_local() && peer.pid == static_cast<uint32_t>(::getpid())) {
    // Endpoints of one process use each other's memory directly, even after one of them was closed. That is a crash
    // (1.17).
    return fabric_error(ErrorCode::kNotReachable, std::string(operation), "shm leads to other processes only");
  }
  return {};
}

Result<Bytes> LibfabricConnector::offer(LinkId link) {
  Result<std::unique_ptr<Endpoint>> endpoint = Endpoint::open(device_, random_key());
  if (!endpoint) return endpoint.error();
  const Result<Card> card = endpoint.value()->card();
  if (!card) return card.error();
  offers_.insert_or_assign(link, std::move(endpoint.value()));
  return card.value().encode();
}

Result<Connector::Accepted> LibfabricConnector::accept(LinkId /*link*/, std::span<const std::byte> offer) {
  const Result<Card> peer = Card::decode("accept", offer);
  if (!peer) return peer.error();
  if (Status reachable = check("accept", peer.value()); !reachable) return reachable.error();
  Result<std::unique_ptr<Endpoint>> endpoint = Endpoint::open(device_, peer.value().secret);
  if (!endpoint) return endpoint.error();
  if (Status met = endpoint.value()->meet(peer.value(), false); !met) return met.error();
  const Result<Card> card = endpoint.value()->card();
  if (!card) return card.error();
  return Accepted{card.value().encode(), std::move(endpoint.value())};
}

Result<std::unique_ptr<LinkEnd>> LibfabricConnector::complete(LinkId link, std::span<const std::byte> answer) {
  const auto offered = offers_.extract(link);
  if (offered.empty()) return fabric_error(ErrorCode::kUnknownPeer, "complete", "the offer was withdrawn");
  std::unique_ptr<Endpoint> endpoint = std::move(offered.mapped());
  const Result<Card> peer = Card::decode("complete", answer);
  if (!peer) return peer.error();
  if (peer.value().secret != endpoint->secret()) {
    return fabric_error(ErrorCode::kInvalidArgument, "complete", "the answer does not belong to this link's offer");
  }
  if (Status reachable = check("complete", peer.value()); !reachable) return reachable.error();
  if (Status met = endpoint->meet(peer.value(), true); !met) return met.error();
  return std::unique_ptr<LinkEnd>(std::move(endpoint));
}

}  // namespace kvc::libfabric
