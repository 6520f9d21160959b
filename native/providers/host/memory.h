// The memory of this process that peers may write over the host lane: regions, and what backs them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "lane/domain.h"
#include "providers/same_host/region_keys.h"

namespace kvc::host {

// A memfd, or without a descriptor the private memory of this process. Made and ended on the memory thread.
struct Memory {
  UniqueFd fd;
  uint64_t bytes = 0;
  // The domain's:
  uint32_t published = 0;  // regions in the memfd
  uint32_t name = 0;       // what peers call it as long as there are any; 0: private memory
};

class Region final : public same_host::BoardRegion {
 public:
  Region(const MemoryRange& range, same_host::RegionKeys& keys, std::shared_ptr<Memory> in)
      : BoardRegion(range, keys), memory(std::move(in)), offset(range.memfd < 0 ? 0 : range.memfd_offset) {}

  const std::shared_ptr<Memory> memory;
  const uint64_t offset;  // in the memfd

  // The domain's: links whose peer was inside its gate when the region was revoked, and the gate's word then.
  std::vector<std::pair<LinkId, uint64_t>> inside;
};

// The memfds with published regions of one domain, whose alone this is.
struct Memories {
  std::map<uint32_t, const Memory*> by_name;
  uint32_t last = 0;  // the last name that was given away: none is used again
};

}  // namespace kvc::host
