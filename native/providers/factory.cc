#include "providers/factory.h"

#include <array>
#include <string>

#include "lane/domain.h"
#include "providers/bounce/provider.h"
#include "providers/host/provider.h"
#include "providers/libfabric/provider.h"
#include "providers/nvlink/provider.h"
#include "providers/shuffle/provider.h"
#include "providers/sim/provider.h"
#include "providers/tcp/provider.h"
#include "providers/verbs/provider.h"

namespace kvc {

namespace {

struct Provider {
  std::string_view name;
  Result<OpenedDomain> (*create)(const DomainConfig&, ControlQueue&);
  void (*load)() = nullptr;  // see load_libraries()
};

// The fastest provider comes first.
constexpr std::array kProviders = {
    Provider{"nvlink", nvlink::create}, Provider{"host", host::create},
    Provider{"verbs", verbs::create},   Provider{"libfabric", libfabric::create, libfabric::load},
    Provider{"tcp", tcp::create},       Provider{"bounce", bounce::create},
    Provider{"sim", sim::create},       Provider{"shuffle", shuffle::create},
};

constexpr auto kNames = [] {
  std::array<std::string_view, kProviders.size()> names;
  for (size_t i = 0; i < kProviders.size(); ++i) names[i] = kProviders[i].name;
  return names;
}();

}  // namespace

std::span<const std::string_view> provider_names() noexcept { return kNames; }

void load_libraries(std::span<const DomainConfig> configs) {
  for (DomainConfig config : configs) {
    while (config.provider == "bounce" || config.provider == "shuffle") config = carrier_of(config);
    for (const Provider& provider : kProviders) {
      if (provider.name == config.provider && provider.load != nullptr) provider.load();
    }
  }
}

Result<OpenedDomain> open_domain(const DomainConfig& config, ControlQueue& control) {
  std::string known;
  for (const Provider& provider : kProviders) {
    if (provider.name == config.provider) return provider.create(config, control);
    known += (known.empty() ? "" : ", ") + std::string(provider.name);
  }
  return Error{ErrorCode::kInvalidArgument,
               config.provider,
               {},
               "open_domain",
               "unknown provider '" + config.provider + "'; known providers: " + known};
}

}  // namespace kvc
