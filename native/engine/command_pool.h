// CommandPool: spent commands, for whoever submits next. A command that one thread allocates and another frees costs
// both of them the allocator's slow path (150 instructions for the submitting one, and a lock that they share).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "engine/command.h"

namespace kvc {

// The worker fills a list of its own and lays it out for others when the one before has been taken; who submits takes
// a command from the list that is in use, and what the worker has laid out where that is empty. Always the whole of a
// list is taken, so that what was taken is the taker's alone.
class CommandPool {
 public:
  // In each list: 0.3 MB. What a larger burst leaves is the allocator's again.
  static constexpr uint32_t kKept = 1024;
  // So many at a time change sides: one by one, each would move the list's cache line there and back.
  static constexpr uint32_t kLaidOut = 32;

  CommandPool() = default;
  CommandPool(const CommandPool&) = delete;
  CommandPool& operator=(const CommandPool&) = delete;
  ~CommandPool() {
    destroy(stash_.load(std::memory_order_relaxed));
    destroy(spent_.load(std::memory_order_relaxed));
    destroy(own_);
  }

  // Any thread; never blocks. An empty command.
  std::unique_ptr<Command> take() {
    Command* list = stash_.exchange(nullptr, std::memory_order_acquire);
    if (list == nullptr) list = spent_.exchange(nullptr, std::memory_order_acquire);
    if (list == nullptr) return std::make_unique<Command>();
    std::unique_ptr<Command> command(list);
    Command* const rest = std::exchange(command->next, nullptr);
    // The worker's core has the next one's cache lines: they are here when it is asked for.
    for (size_t line = 0; rest != nullptr && line < sizeof(Command); line += 64) {
      __builtin_prefetch(reinterpret_cast<const std::byte*>(rest) + line, 1);
    }
    // Not null only where another thread came in between with a list of its own: one of the two is given up.
    destroy(stash_.exchange(rest, std::memory_order_acq_rel));
    return command;
  }

  // Commands in all lists, while nobody takes or gives any. For tests.
  uint32_t size() const {
    uint32_t count = 0;
    for (const Command* list : {stash_.load(std::memory_order_relaxed), spent_.load(std::memory_order_relaxed), own_}) {
      for (; list != nullptr; list = list->next) ++count;
    }
    return count;
  }

  // The worker only: it has been carried out.
  void give(std::unique_ptr<Command> command) {
    command->body.emplace<std::monostate>();  // what it held ends now
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

  alignas(64) std::atomic<Command*> stash_{nullptr};  // in use by those who submit
  alignas(64) std::atomic<Command*> spent_{nullptr};  // laid out
  // The worker's:
  alignas(64) Command* own_ = nullptr;
  uint32_t given_ = 0;  // how many these are
};

}  // namespace kvc
