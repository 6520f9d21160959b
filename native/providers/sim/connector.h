// SimConnector: makes links between sim domains of one fabric.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "lane/domain.h"
#include "providers/sim/link.h"

namespace kvc::sim {

class SimConnector final : public Connector {
 public:
  SimConnector(std::string name, std::shared_ptr<Fabric> fabric, std::shared_ptr<Nic> nic, std::shared_ptr<Inbox> inbox)
      : name_(std::move(name)), fabric_(std::move(fabric)), nic_(std::move(nic)), inbox_(std::move(inbox)) {}

  std::string description() const override { return "sim " + name_; }
  uint64_t bits_per_second() const override { return nic_->bits_per_second.load(); }
  Result<std::unique_ptr<Registration>> register_memory(const MemoryRange& range) override;
  Result<Bytes> offer(LinkId link) override;
  Result<Accepted> accept(LinkId link, std::span<const std::byte> offer) override;
  Result<std::unique_ptr<LinkEnd>> complete(LinkId link, std::span<const std::byte> answer) override;
  void withdraw(LinkId link) override;

 private:
  struct Offered {
    uint64_t secret = 0;  // the key under which the gate waits in the fabric
    std::unique_ptr<Link> link;
  };

  const std::string name_;  // the fabric's name
  const std::shared_ptr<Fabric> fabric_;
  const std::shared_ptr<Nic> nic_;
  const std::shared_ptr<Inbox> inbox_;  // the domain's inbox
  std::map<LinkId, Offered> offers_;
};

}  // namespace kvc::sim
