// CompletionWord: memory that says how far a set of counters has come, for whoever polls it and is not the processor's: a
// kernel that runs.
#pragma once

#include <cstdint>

#include "base/error.h"

namespace kvc {

class CompletionWord {
 public:
  virtual ~CompletionWord() = default;

  // The word becomes `value` once the pages that have landed so far are visible to whoever reads it, perhaps after this has
  // returned. One thread at a time; does not block.
  virtual Status store(uint64_t value) noexcept = 0;
};

}  // namespace kvc
