#include "lane/domain.h"

namespace kvc {

DomainConfig carrier_of(const DomainConfig& config) {
  DomainConfig carrier = config;
  const size_t colon = config.device.find(':');
  carrier.provider = config.device.empty() ? "tcp" : config.device.substr(0, colon);
  carrier.device = colon == std::string::npos ? "" : config.device.substr(colon + 1);
  return carrier;
}

}  // namespace kvc
