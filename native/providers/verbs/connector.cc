#include "providers/verbs/connector.h"

#include "providers/verbs/domain.h"

namespace kvc::verbs {

Result<OpenedDomain> VerbsConnector::open(const DomainConfig& config, ControlQueue& control, const Library& library,
                                          const Tuning& tuning) {
  Result<DeviceSpec> spec = DeviceSpec::parse(config.device);
  if (!spec) return spec.error();
  Result<std::unique_ptr<Device>> device = Device::open(library, spec.value());
  if (!device) return device.error();
  Result<std::unique_ptr<DomainResources>> resources = DomainResources::open(std::move(device.value()), tuning);
  if (!resources) return resources.error();
  Result<std::unique_ptr<Domain>> domain = VerbsDomain::create(*resources.value(), control);
  if (!domain) return domain.error();
  OpenedDomain opened;
  opened.connector.reset(new VerbsConnector(std::move(resources.value())));
  opened.domain = std::move(domain.value());
  return opened;
}

Result<std::unique_ptr<Connection>> VerbsConnector::make_connection(bool offering) const {
  const int event = resources_->failed_by.load(std::memory_order_relaxed);
  if (event != DomainResources::kSound) {
    const Device& device = *resources_->device;
    return verbs_error(ErrorCode::kSystem, "connect",
                       device.spec().name + " has failed: " + device.library().event_type_str(event));
  }
  return Connection::create(*resources_, offering);
}

Result<Bytes> VerbsConnector::offer(LinkId link) {
  Result<std::unique_ptr<Connection>> connection = make_connection(true);
  if (!connection) return connection.error();
  Bytes bytes = connection.value()->endpoint(link, resources_->device->address()).encode();
  offers_.emplace(link, std::move(connection.value()));
  return bytes;
}

Result<Connector::Accepted> VerbsConnector::accept(LinkId /*link*/, std::span<const std::byte> offer) {
  Result<Endpoint> peer = Endpoint::decode(offer, "accept");
  if (!peer) return peer.error();
  Result<Address> address = resources_->device->address_for(peer.value().address);
  if (!address) return address.error();
  Result<Path> path = resources_->device->path_to(peer.value().address);
  if (!path) return path.error();
  Result<std::unique_ptr<Connection>> connection = make_connection(false);
  if (!connection) return connection.error();
  if (Status connected = connection.value()->connect(path.value(), peer.value()); !connected) return connected.error();
  Bytes answer = connection.value()->endpoint(peer.value().link, address.value()).encode();
  return Accepted{std::move(answer), std::move(connection.value())};
}

Result<std::unique_ptr<LinkEnd>> VerbsConnector::complete(LinkId link, std::span<const std::byte> answer) {
  const auto offered = offers_.extract(link);
  if (offered.empty()) return verbs_error(ErrorCode::kUnknownPeer, "complete", "no such offer");
  Result<Endpoint> peer = Endpoint::decode(answer, "complete");
  if (!peer) return peer.error();
  if (peer.value().link != link) {
    return verbs_error(ErrorCode::kInvalidArgument, "complete", "not the answer to this link's offer");
  }
  Result<Path> path = resources_->device->path_to(peer.value().address);
  if (!path) return path.error();
  std::unique_ptr<Connection> connection = std::move(offered.mapped());
  if (Status connected = connection->connect(path.value(), peer.value()); !connected) return connected.error();
  return std::unique_ptr<LinkEnd>(std::move(connection));
}

}  // namespace kvc::verbs
