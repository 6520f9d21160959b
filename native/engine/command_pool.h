// CommandPool: used commands, for the next submission. If one thread allocates a command and another frees it, both
// take the allocator's slow path: 150 instructions for the submitting thread, and a lock that both share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "engine/command.h"

namespace kvc {

// Three lists. The transfer thread fills its own list. When the previous published list has been taken, it publishes
// this one. A submitting thread takes a command from the list in use, and takes the published list if that one is
// empty. A thread always takes a whole list, so that its commands belong to it alone.
class CommandPool {
 public:
  // Most commands in each list: 0.3 MB. The allocator frees the commands of a larger burst.
  static constexpr uint32_t kKept = 1024;
  // Commands that are published at once. Single commands would move the list's cache line back and forth.
  static constexpr uint32_t kLaidOut = 32;

  CommandPool() = default;
  CommandPool(const CommandPool&) = delete;
  CommandPool& operator=(const CommandPool&) = delete;
  ~CommandPool() {
    destroy(stash_.load(std::memory_order_relaxed));
    destroy(spent_.load(std::memory_order_relaxed));
    destroy(own_);
  }

  // Returns an empty command. Any thread; never blocks.
  std::unique_ptr<Command> take() {
    Command* list = stash_.exchange(nullptr, std::memory_order_acquire);
    if (list == nullptr) list = spent_.exchange(nullptr, std::memory_order_acquire);
    if (list == nullptr) return std::make_unique<Command>();
    std::unique_ptr<Command> command(list);
    Command* const rest = std::exchange(command->next, nullptr);
    // The next command's cache lines are on the transfer thread's core. The prefetch brings them here in time.
    for (size_t line = 0; rest != nullptr && line < sizeof(Command); line += 64) {
      __builtin_prefetch(reinterpret_cast<const std::byte*>(rest) + line, 1);
    }
    // The old value is null unless another thread put its list there in between. One of the two lists is then freed.
    destroy(stash_.exchange(rest, std::memory_order_acq_rel));
    return command;
  }

  // Number of commands in all lists, for tests, while no thread takes or gives any.
  uint32_t size() const {
    uint32_t count = 0;
    for (const Command* list : {stash_.load(std::memory_order_relaxed), spent_.load(std::memory_order_relaxed), own_}) {
      for (; list != nullptr; list = list->next) ++count;
    }
    return count;
  }

  // Takes back a command that was carried out. The transfer thread only.
  void give(std::unique_ptr<Command> command) {
    command->body.emplace<std::monostate>();  // releases what the command held
    if (given_ == kKept) return;
    ++given_;
    Command* const empty = command.release();
    empty->next = std::exchange(own_, empty);
    if (given_ < kLaidOut || spent_.load(std::memory_order_relaxed) != nullptr) return;
    given_ = 0;
    spent_.store(std::exchange(own_, nullptr), std::memory_order_release);
  }

 private:
  static void destroy(Command* list) {
    while (list != nullptr) {
      const std::unique_ptr<Command> command(list);
      list = command->next;
    }
  }

  alignas(64) std::atomic<Command*> stash_{nullptr};  // used by submitting threads
  alignas(64) std::atomic<Command*> spent_{nullptr};  // published by the transfer thread
  // Used by the transfer thread:
  alignas(64) Command* own_ = nullptr;
  uint32_t given_ = 0;  // number of commands in own_
};

}  // namespace kvc
