// Lanes: the domains of one transfer engine and their connectors, by provider.
//
// Filled when the transfer engine opens and not changed afterwards, so any thread may read it. Connector and Domain
// define which thread may call their methods.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/domain_thread.h"
#include "engine/memory_region.h"
#include "engine/transfer_engine.h"
#include "lane/domain.h"

namespace kvc {

struct LaneDomain {
  uint32_t place = 0;  // index among all domains of the transfer engine
  std::string description;
  uint64_t bits_per_second = 0;
  std::unique_ptr<Connector> connector;
  std::unique_ptr<Domain> domain;
};

// All domains of one provider, in the order of the configuration.
struct Lane {
  std::string provider;
  DomainLimits limits;
  std::vector<LaneDomain> domains;
};

class Lanes {
 public:
  // Opens every configured domain. With allow_fallback, domains that cannot be opened are left out (see unusable()), as
  // long as one opens. Runs on the thread that will drive the domains. If `others` is not empty, its threads drive the
  // domains in turn. Blocks.
  Status open(const EngineConfig& config, ControlQueue& control, std::span<const std::unique_ptr<DomainThread>> others);

  std::vector<Lane>& all() noexcept { return lanes_; }
  const std::vector<Lane>& all() const noexcept { return lanes_; }
  // Null if there is no such lane.
  const Lane* find(std::string_view provider) const noexcept;
  Lane* find(std::string_view provider) noexcept {
    return const_cast<Lane*>(static_cast<const Lanes*>(this)->find(provider));
  }
  size_t domains() const noexcept { return descriptions_.size(); }
  // In the order of EngineConfig::domains.
  const std::vector<std::string>& descriptions() const noexcept { return descriptions_; }
  const std::vector<Error>& unusable() const noexcept { return unusable_; }

  // Registers the memory with each domain. A lane that does not reach this kind of memory is skipped and its reason
  // kept, as long as another lane takes the memory. Runs on the memory thread; blocks.
  Result<std::shared_ptr<LocalMemory>> register_memory(const MemoryRange& range, bool allow_fallback);

  // End the two halves, in this order: on the driving thread, then on the control thread.
  void close_domains();
  void close_connectors() { lanes_.clear(); }

 private:
  std::vector<Lane> lanes_;  // in order of preference
  std::vector<std::string> descriptions_;
  std::vector<Error> unusable_;
};

}  // namespace kvc
