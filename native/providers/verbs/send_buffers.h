// SendBuffers: registered memory into which messages are copied before they leave.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lane/domain.h"
#include "providers/verbs/memory.h"

namespace kvc::verbs {

// Created and destroyed on the control thread. The domain uses it in between.
class SendBuffers {
 public:
  static Result<std::unique_ptr<SendBuffers>> create(const Device& device, uint32_t count) {
    auto buffers = std::make_unique<SendBuffers>();
    const size_t bytes = size_t{count} * kMaxMessageBytes;
    buffers->memory_ = std::make_unique<std::byte[]>(bytes);
    Result<Owned<abi::ibv_mr>> mr = register_host_memory(device, buffers->memory_.get(), bytes);
    if (!mr) return mr.error();
    buffers->mr_ = std::move(mr.value());
    for (uint32_t i = 0; i < count; ++i) buffers->free_.push_back(i);
    return buffers;
  }

  // Takes a buffer of kMaxMessageBytes. Returns nullopt if all are in use.
  std::optional<uint32_t> take() {
    if (free_.empty()) return std::nullopt;
    const uint32_t buffer = free_.back();
    free_.pop_back();
    return buffer;
  }
  void give_back(uint32_t buffer) { free_.push_back(buffer); }
  std::byte* data(uint32_t buffer) const noexcept { return memory_.get() + size_t{buffer} * kMaxMessageBytes; }
  uint32_t lkey() const noexcept { return mr_->lkey; }
  size_t free() const noexcept { return free_.size(); }

 private:
  std::unique_ptr<std::byte[]> memory_;
  Owned<abi::ibv_mr> mr_{nullptr, nullptr};
  std::vector<uint32_t> free_;
};

}  // namespace kvc::verbs
