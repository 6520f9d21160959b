// Completions: takes entries out of the completion queue, and arms its wake-up.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "providers/verbs/queues.h"

namespace kvc::verbs {

// One thread: the domain's.
class Completions {
 public:
  static constexpr uint32_t kBatch = 32;  // entries taken by one call of the library's

  // `queues` outlives it.
  explicit Completions(const Queues& queues) : queues_(queues) {}
  ~Completions();
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // The next entries, valid until the next call; none: the queue was empty.
  std::span<const abi::ibv_wc> take() noexcept;

  // A moment between two calls of take(). What was in the queue then has been taken once the queue was found empty
  // since, or as many entries were taken as it can hold.
  class Mark {
    friend Completions;
    uint64_t taken = 0;
    uint64_t found_empty = 0;
  };
  Mark mark() const noexcept;
  bool passed(const Mark& mark) const noexcept;

  // The thread is about to sleep. False: what woke it up was no completion. Afterwards the next entry makes the channel
  // readable, but none that is there already: take() once more.
  bool arm() noexcept;

 private:
  bool read_event() noexcept;

  const Queues& queues_;
  std::array<abi::ibv_wc, kBatch> batch_{};
  uint64_t taken_ = 0;
  uint64_t found_empty_ = 0;
  bool armed_ = false;
  unsigned unacknowledged_ = 0;  // events read and not acknowledged yet
};

}  // namespace kvc::verbs
