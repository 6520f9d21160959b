// LibfabricConnector: registers memory with one device, and makes the endpoints of links.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "lane/domain.h"
#include "providers/libfabric/device.h"
#include "providers/libfabric/endpoint.h"

namespace kvc::libfabric {

class LibfabricConnector final : public Connector {
 public:
  explicit LibfabricConnector(std::shared_ptr<const Device> device) : device_(std::move(device)) {}

  std::string description() const override;
  uint64_t bits_per_second() const override { return device_->bits_per_second(); }
  DomainLimits limits() const override;
  Result<std::unique_ptr<Registration>> register_memory(const MemoryRange& range) override;
  Result<Bytes> offer(LinkId link) override;
  Result<Accepted> accept(LinkId link, std::span<const std::byte> offer) override;
  Result<std::unique_ptr<LinkEnd>> complete(LinkId link, std::span<const std::byte> answer) override;
  void withdraw(LinkId link) override { offers_.erase(link); }

 private:
  // Returns whether this device can reach the peer's: kRefused or kNotReachable if not.
  Status check(std::string_view operation, const Card& peer) const;

  const std::shared_ptr<const Device> device_;
  std::unordered_map<LinkId, std::unique_ptr<Endpoint>> offers_;
};

}  // namespace kvc::libfabric
