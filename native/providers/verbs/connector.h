// VerbsConnector: registers memory with one port of one RDMA NIC and connects queue pairs.
//
// Queue pairs are connected through the offer and answer of the control plane alone, without datagrams. The accepting
// side can receive before the offering side learns where to send. It posts nothing before it receives the offering
// side's hello, the first message on the link.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "lane/domain.h"
#include "providers/verbs/connection.h"
#include "providers/verbs/domain_resources.h"
#include "providers/verbs/memory.h"

namespace kvc::verbs {

class VerbsConnector final : public Connector {
 public:
  // Opens both halves, on the port that `config.device` names.
  static Result<OpenedDomain> open(const DomainConfig& config, ControlQueue& control, const Library& library,
                                   const Tuning& tuning);

  std::string description() const override { return "verbs " + resources_->device->description(); }
  uint64_t bits_per_second() const override { return resources_->device->bits_per_second(); }
  Result<std::unique_ptr<Registration>> register_memory(const MemoryRange& range) override {
    return MemoryRegistration::create(*resources_->device, resources_->key_half, range);
  }
  Result<Bytes> offer(LinkId link) override;
  Result<Accepted> accept(LinkId link, std::span<const std::byte> offer) override;
  Result<std::unique_ptr<LinkEnd>> complete(LinkId link, std::span<const std::byte> answer) override;
  void withdraw(LinkId link) override { offers_.erase(link); }

 private:
  explicit VerbsConnector(std::unique_ptr<DomainResources> resources) : resources_(std::move(resources)) {}
  Result<std::unique_ptr<Connection>> make_connection(bool offering) const;

  const std::unique_ptr<DomainResources> resources_;
  std::map<LinkId, std::unique_ptr<Connection>> offers_;
};

}  // namespace kvc::verbs
