// CompletionWord: a 64-bit word with the progress of a counter set, or the count of a counter, for a poller that makes no
// call: a running kernel, or a thread.
#pragma once

#include <cstdint>

#include "base/error.h"

namespace kvc {

class CompletionWord {
 public:
  virtual ~CompletionWord() = default;

  // Sets the word to `value` once all pages that have landed so far are visible to its readers. This may happen after
  // the call returned. One thread at a time; does not block.
  virtual Status store(uint64_t value) noexcept = 0;
};

}  // namespace kvc
