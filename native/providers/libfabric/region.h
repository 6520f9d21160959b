// Region: memory of this process that was registered with a device.
#pragma once

#include <rdma/fi_domain.h>

#include <memory>
#include <utility>

#include "base/random.h"
#include "lane/domain.h"
#include "providers/libfabric/device.h"

namespace kvc::libfabric {

// Access rights of regions: we read them to write elsewhere, and peers write them.
inline constexpr uint64_t kRegionAccess = FI_WRITE | FI_REMOTE_WRITE;

// `landing` counts the links whose peers have been told how to write here.
class Region final : public Registration {
 public:
  Region(std::shared_ptr<const Device> opened, const MemoryRange& range, Memory registered)
      : Registration(range, random_key()), device(std::move(opened)), memory(std::move(registered)) {}

  const std::shared_ptr<const Device> device;
  const Memory memory;  // none where each endpoint has its own (Device::memory_per_endpoint())
};

}  // namespace kvc::libfabric
