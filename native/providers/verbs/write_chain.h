// WriteChain: the work requests of a batch, chained and filled in once. A post changes only the fields that differ.
#pragma once

#include <array>
#include <cstdint>

#include "lane/immediate.h"
#include "providers/verbs/abi.h"

namespace kvc::verbs {

class WriteChain {
 public:
  static constexpr uint32_t kLength = Immediate::kMaxMultiplicity;

  WriteChain() {
    for (uint32_t i = 0; i < kLength; ++i) {
      mend(i);
      requests_[i].sg_list = &pieces_[i];
    }
  }
  WriteChain(const WriteChain&) = delete;
  WriteChain& operator=(const WriteChain&) = delete;

  // Ends the chain after `count` requests. mend() undoes it.
  void cut(uint32_t count) noexcept { requests_[count - 1].next = nullptr; }
  void mend(uint32_t count) noexcept {
    if (count > 0 && count < kLength) requests_[count - 1].next = &requests_[count];
  }
  abi::ibv_send_wr& request(uint32_t i) noexcept { return requests_[i]; }
  abi::ibv_sge& piece(uint32_t i) noexcept { return pieces_[i]; }

 private:
  std::array<abi::ibv_send_wr, kLength> requests_{};
  std::array<abi::ibv_sge, kLength> pieces_{};
};

}  // namespace kvc::verbs
