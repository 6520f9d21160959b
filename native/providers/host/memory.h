// The memory of this process that peers may write over the host lane: the regions, and the memory behind them.
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

// A memfd, or without a descriptor the private memory of this process. Created and destroyed on the memory thread.
struct Memory {
  UniqueFd fd;
  uint64_t bytes = 0;
  // Used by the domain:
  uint32_t published = 0;  // regions in the memfd
  uint32_t name = 0;       // the peers' name for it while it has published regions; 0: private memory
};

class Region final : public same_host::BoardRegion {
 public:
  Region(const MemoryRange& range, same_host::RegionKeys& keys, std::shared_ptr<Memory> in)
      : BoardRegion(range, keys), memory(std::move(in)), offset(range.memfd < 0 ? 0 : range.memfd_offset) {}

  const std::shared_ptr<Memory> memory;
  const uint64_t offset;  // offset in the memfd

  // Used by the domain: links whose peer was inside its gate when the region was revoked, with the gate's word at that
  // time.
  std::vector<std::pair<LinkId, uint64_t>> inside;
};

// The memfds of one domain that have published regions. Only that domain uses the object.
struct Memories {
  std::map<uint32_t, const Memory*> by_name;
  uint32_t last = 0;  // the last assigned name; no name is used twice
};

}  // namespace kvc::host
