// Region: memory of this process that is registered with a device.
#pragma once

#include <rdma/fi_domain.h>

#include <memory>
#include <utility>

#include "base/random.h"
#include "lane/domain.h"
#include "providers/libfabric/device.h"

namespace kvc::libfabric {

// Access rights of regions: this side reads them to write elsewhere, and peers write them.
inline constexpr uint64_t kRegionAccess = FI_WRITE | FI_REMOTE_WRITE;

// `landing` counts the links whose peers have received the region's key.
class Region final : public Registration {
 public:
  Region(std::shared_ptr<const Device> opened, const MemoryRange& range, Memory registered)
      : Registration(range, random_key()), device(std::move(opened)), memory(std::move(registered)) {}

  const std::shared_ptr<const Device> device;
  const Memory memory;  // null if each endpoint has its own registration (Device::memory_per_endpoint())
};

}  // namespace kvc::libfabric
