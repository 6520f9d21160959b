#include "moe/group_config.h"

#include <string>
#include <utility>

#include "moe/layout.h"

namespace kvc::moe {

Status check(const GroupConfig& config) {
  const auto refuse = [](std::string message) { return invalid("moe_group", std::move(message)); };
  if (config.ranks == 0 || config.ranks > kMaxRanks) {
    return refuse(std::to_string(config.ranks) + " ranks: 1 to " + std::to_string(kMaxRanks) + " are supported");
  }
  if (config.rank >= config.ranks) {
    return refuse("rank " + std::to_string(config.rank) + " of " + std::to_string(config.ranks) +
                  ": ranks are counted from 0");
  }
  if (config.slots == 0 || config.slots > kMaxSlots) {
    return refuse(std::to_string(config.slots) + " slots: 1 or 2 are supported");
  }
  if (config.max_tokens == 0 || config.dispatch_bytes == 0 || config.combine_bytes == 0) {
    return refuse("max_tokens, dispatch_bytes and combine_bytes must not be 0");
  }
  constexpr uint64_t kMost = 1ULL << 40;
  if (config.dispatch_bytes > kMost || config.combine_bytes > kMost) {
    return refuse("dispatch_bytes and combine_bytes must not exceed 1 TiB");
  }
  // Rows are numbered in 32 bits, and the rank of an expert fits into a byte.
  if (config.max_tokens > kMaxGroupTokens || config.experts > 1U << 16) {
    return refuse("max_tokens must not exceed 2^24, and experts must not exceed 2^16");
  }
  if (config.timeout_ns == 0 || config.timeout_ns > kLongestNs) {
    return refuse("the timeout must be above 0 and at most 11 days");
  }
  if (config.device < -1) {
    return refuse("device " + std::to_string(config.device) + ": give the ordinal of a GPU, or -1 for host memory");
  }
  return {};
}

}  // namespace kvc::moe
