// Lanes: the domains of one engine, by provider, and their control halves.
//
// Filled when the engine opens and not changed after that, so any thread may look; whose method may be called where is
// Connector's and Domain's own affair.
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
  uint32_t place = 0;  // among all domains of the engine
  std::string description;
  uint64_t bits_per_second = 0;
  std::unique_ptr<Connector> connector;
  std::unique_ptr<Domain> domain;
};

// All domains of one provider.
struct Lane {
  std::string provider;
  DomainLimits limits;
  std::vector<LaneDomain> domains;
};

class Lanes {
 public:
  // Opens every configured domain. With allow_fallback, those that cannot be opened are left out (see unusable()),
  // as long as one is left. On the thread that will drive them, or on `others` by turns, where there are any; blocks.
  Status open(const EngineConfig& config, ControlQueue& control, std::span<const std::unique_ptr<DomainThread>> others);

  std::vector<Lane>& all() noexcept { return lanes_; }
  const std::vector<Lane>& all() const noexcept { return lanes_; }
  // Null: no such lane.
  const Lane* find(std::string_view provider) const noexcept;
  Lane* find(std::string_view provider) noexcept {
    return const_cast<Lane*>(static_cast<const Lanes*>(this)->find(provider));
  }
  size_t domains() const noexcept { return descriptions_.size(); }
  // In the order of EngineConfig::domains.
  const std::vector<std::string>& descriptions() const noexcept { return descriptions_; }
  const std::vector<Error>& unusable() const noexcept { return unusable_; }

  // Has each domain register the memory; a lane that does not reach memory of this kind is passed over, with its reason, as
  // long as one takes it. On the memory thread; blocks.
  Result<std::shared_ptr<LocalMemory>> register_memory(const MemoryRange& range, bool allow_fallback);

  // The two halves end, in this order: on the driving thread, and on the control thread.
  void close_domains();
  void close_connectors() { lanes_.clear(); }

 private:
  std::vector<Lane> lanes_;  // in order of preference
  std::vector<std::string> descriptions_;
  std::vector<Error> unusable_;
};

}  // namespace kvc
