// HostCompletionWord: a completion word in ordinary host memory, for pollers on a CPU.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/error.h"
#include "lane/completion_word.h"

namespace kvc {

// Any thread may read the word at any time.
class HostCompletionWord final : public CompletionWord {
 public:
  Status store(uint64_t value) noexcept override {
    word_.store(value, std::memory_order_release);
    return {};
  }
  // The value. Everything that landed before it was stored is visible.
  uint64_t load() const noexcept { return word_.load(std::memory_order_acquire); }

 private:
  alignas(64) std::atomic<uint64_t> word_{0};  // its own cache line, because it is polled
};

}  // namespace kvc
