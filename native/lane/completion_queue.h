// CompletionQueue: the events of one domain, as data. The domain appends in order; the thread that drives the domain
// takes them out.
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

using LinkId = uint32_t;  // chosen by the transfer engine, unique in the process, never reused
// Chosen by the transfer engine: id of a posted batch or message, which its completion returns.
using WorkId = uint64_t;

// One event of a domain.
struct Completion {
  enum class Kind : uint8_t {
    // A posted batch or message ended. Without an error, every page is in place at the peer, or the peer's transfer
    // engine has taken the message. With an error, some pages may be in place, and the peer may have counted none, some
    // or all of them. Each accepted batch ends exactly once, also if its link breaks or is fenced. It does not end
    // before its source bytes may be overwritten.
    kWork,
    // `immediate` (with its multiplicity) landed over `link`. Its pages are visible from now on.
    kImmediate,
    // A message of the peer arrived over `link`. `bytes` is its contents, and it occupies the sender's `slot` until
    // Domain::take() frees the slot. Messages arrive in no particular order, each exactly once.
    kMessage,
    // The link broke. The thread that drives the domain must fence the link, which ends everything posted on it.
    kLinkDown,
  };
  Kind kind = Kind::kWork;
  LinkId link = 0;     // kImmediate, kMessage, kLinkDown
  uint64_t value = 0;  // WorkId (kWork), immediate (kImmediate) or slot (kMessage)
  // Allocated only when needed, because it is rare: null for a successful batch and for an immediate.
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
  // Appends an event that another domain has reported.
  void put(Completion completion) { entries_.push_back(std::move(completion)); }

  // --- The thread that drives the domain.

  bool empty() const noexcept { return entries_.empty(); }
  // Calls `use(Completion&)` for each event, oldest first, including events that arrive meanwhile. Returns false if
  // there was none.
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

  std::vector<Completion> entries_;  // its memory is reused
};

}  // namespace kvc
