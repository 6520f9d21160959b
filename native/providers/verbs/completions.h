// Completions: takes entries out of the completion queue, and arms its wake-up.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "providers/verbs/domain_resources.h"

namespace kvc::verbs {

// Used on the domain's thread only.
class Completions {
 public:
  static constexpr uint32_t kBatch = 32;  // entries taken by one call of the library

  // `resources` outlives it.
  explicit Completions(const DomainResources& resources) : resources_(resources) {}
  ~Completions();
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // Returns the next entries, valid until the next call; empty if the queue was empty.
  std::span<const abi::ibv_wc> take() noexcept;

  // A point in time between two calls of take(). The entries that were in the queue at that point have been taken in
  // either of two cases. The queue was found empty since, or as many entries were taken as it can hold.
  class Mark {
    friend Completions;
    uint64_t taken = 0;
    uint64_t found_empty = 0;
  };
  Mark mark() const noexcept;
  bool passed(const Mark& mark) const noexcept;

  // Arms the wake-up before the thread sleeps. Returns false if it is still armed, because no completion has come
  // since. Otherwise the next new entry makes the channel readable. Entries that are there already do not, so call
  // take() once more.
  bool arm() noexcept;

 private:
  bool read_event() noexcept;

  const DomainResources& resources_;
  std::array<abi::ibv_wc, kBatch> batch_{};
  uint64_t taken_ = 0;
  uint64_t found_empty_ = 0;
  bool armed_ = false;
  unsigned unacknowledged_ = 0;  // events read and not acknowledged yet
};

}  // namespace kvc::verbs
