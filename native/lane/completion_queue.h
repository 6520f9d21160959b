// CompletionQueue: what happened in a domain, as data. The domain puts in, in order; who drives it takes out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"

namespace kvc {

using LinkId = uint32_t;  // chosen by the engine, unique in the process, never reused
using WorkId = uint64_t;  // chosen by the engine: our own id of a posted batch or message, returned in its completion

// One thing that happened.
struct Completion {
  enum class Kind : uint8_t {
    // A posted batch or message ended. No error: every page is in place at the peer, or its engine has taken the message.
    // Otherwise some pages may be in place, and the count at the peer may be anything from none to all of them. Each
    // accepted batch ends exactly once, also when its link breaks or is fenced, and not before its source bytes may be
    // overwritten.
    kWork,
    // `immediate` (with its multiplicity) landed over `link`: its pages are visible now.
    kImmediate,
    // A peer's message came over `link`: `bytes`, in the sender's `slot` until Domain::take() gives that back. Messages
    // come in no particular order, and each one once.
    kMessage,
    // The link broke. Whoever drives the domain fences it, which ends what is still posted on it.
    kLinkDown,
  };
  Kind kind = Kind::kWork;
  LinkId link = 0;     // kImmediate, kMessage, kLinkDown
  uint64_t value = 0;  // kWork: the WorkId; kImmediate: the immediate; kMessage: the slot
  // Rare, and so apart: null for a batch that went well, and for an immediate.
  struct Detail {
    Error error;
    Bytes bytes;
  };
  std::unique_ptr<Detail> detail{};

  WorkId work() const noexcept { return value; }
  uint32_t immediate() const noexcept { return static_cast<uint32_t>(value); }
  uint32_t slot() const noexcept { return static_cast<uint32_t>(value); }
  const Error* error() const noexcept { return detail != nullptr ? &detail->error : nullptr; }
  Bytes& bytes() noexcept { return detail->bytes; }
};

// One thread.
class CompletionQueue {
 public:
  // --- The domain.

  void done(WorkId work) { entries_.push_back({.kind = Completion::Kind::kWork, .value = work}); }
  void failed(WorkId work, Error error) {
    entries_.push_back({Completion::Kind::kWork, 0, work, detail(std::move(error), {})});
  }
  void immediate(LinkId link, uint32_t immediate) {
    entries_.push_back({.kind = Completion::Kind::kImmediate, .link = link, .value = immediate});
  }
  void message(LinkId link, uint32_t slot, std::span<const std::byte> bytes) {
    entries_.push_back({Completion::Kind::kMessage, link, slot, detail({}, Bytes(bytes.begin(), bytes.end()))});
  }
  void link_down(LinkId link, Error error) {
    entries_.push_back({Completion::Kind::kLinkDown, link, 0, detail(std::move(error), {})});
  }
  // One that another domain has put out.
  void put(Completion completion) { entries_.push_back(std::move(completion)); }

  // --- Whoever drives it.

  bool empty() const noexcept { return entries_.empty(); }
  // Calls `use(Completion&)` for each, oldest first, those included that come meanwhile; false if there was none.
  template <typename Use>
  bool drain(Use&& use) {
    if (entries_.empty()) return false;
    for (size_t i = 0; i < entries_.size(); ++i) {
      Completion completion = std::move(entries_[i]);
      use(completion);
    }
    entries_.clear();
    return true;
  }

 private:
  static std::unique_ptr<Completion::Detail> detail(Error error, Bytes bytes) {
    return std::make_unique<Completion::Detail>(Completion::Detail{std::move(error), std::move(bytes)});
  }

  std::vector<Completion> entries_;  // its memory is used again
};

}  // namespace kvc
