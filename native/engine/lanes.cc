#include "engine/lanes.h"

#include <algorithm>
#include <utility>

namespace kvc {

Status Lanes::open(const EngineConfig& config, ControlQueue& control,
                   std::span<const std::unique_ptr<DomainThread>> others) {
  size_t turn = 0;
  for (const DomainConfig& domain_config : config.domains) {
    Result<OpenedDomain> opened = others.empty()
                                      ? config.open(domain_config, control)
                                      : others[turn++ % others.size()]->open(config.open, domain_config, control);
    if (!opened) {
      if (!config.allow_fallback) return opened.error();
      unusable_.push_back(std::move(opened.error()));
      continue;
    }
    Connector& connector = *opened.value().connector;
    Lane* lane = find(domain_config.provider);
    if (lane == nullptr) lane = &lanes_.emplace_back(Lane{domain_config.provider, connector.limits(), {}});
    descriptions_.push_back(connector.description());
    lane->domains.push_back({static_cast<uint32_t>(descriptions_.size() - 1), connector.description(),
                             connector.bits_per_second(), std::move(opened.value().connector),
                             std::move(opened.value().domain)});
  }
  if (lanes_.empty()) return unusable_.front();  // config.domains is not empty
  return {};
}

const Lane* Lanes::find(std::string_view provider) const noexcept {
  const auto found =
      std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& lane) { return lane.provider == provider; });
  return found == lanes_.end() ? nullptr : &*found;
}

Result<std::shared_ptr<LocalMemory>> Lanes::register_memory(const MemoryRange& range, bool allow_fallback) {
  auto memory = std::make_shared<LocalMemory>(range);
  memory->registrations.resize(domains());
  memory->withdrawn.resize(domains(), false);
  std::optional<Error> first;
  bool any = false;
  for (Lane& lane : lanes_) {
    std::optional<Error> refused;
    for (LaneDomain& domain : lane.domains) {
      Result<std::unique_ptr<Registration>> registration = domain.connector->register_memory(range);
      if (!registration) {
        refused = std::move(registration.error());
        break;
      }
      memory->registrations[domain.place] = std::move(registration.value());
    }
    if (!refused) {
      any = true;
      continue;
    }
    // A lane takes memory with all of its domains or with none.
    for (LaneDomain& domain : lane.domains) memory->registrations[domain.place].reset();
    if (refused->code != ErrorCode::kNotReachable && !allow_fallback) return *refused;
    memory->refusals.push_back(refused->to_string());
    if (!first) first = std::move(refused);
  }
  if (any) {
    for (const auto& registration : memory->registrations) {
      memory->keys.push_back(registration ? std::optional(registration->key) : std::nullopt);
    }
    return memory;
  }
  for (size_t i = 1; i < memory->refusals.size(); ++i) first->message += "; " + memory->refusals[i];
  return *std::move(first);
}

void Lanes::close_domains() {
  for (Lane& lane : lanes_) {
    for (LaneDomain& domain : lane.domains) domain.domain.reset();
  }
}

}  // namespace kvc
