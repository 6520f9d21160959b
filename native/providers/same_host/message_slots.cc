#include "providers/same_host/message_slots.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace kvc::same_host {

namespace {

constexpr uint64_t kAllSlots = (uint64_t{1} << kMessageSlots) - 1;

}  // namespace

// --- Sending

bool MessageSlots::put(WorkId work, std::span<const std::byte> message) noexcept {
  const auto place = static_cast<size_t>(std::countr_one(put_ ^ seen_));
  if (place >= kMessageSlots) return false;
  MessageSlot& slot = out_.sender->messages[place];
  for (size_t at = 0; at < message.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, message.data() + at, std::min(sizeof(word), message.size() - at));
    slot.words[at / sizeof(word)].store(word, std::memory_order_relaxed);
  }
  slot.bytes.store(message.size(), std::memory_order_relaxed);
  works_[place] = work;
  put_ ^= uint64_t{1} << place;
  handing_over();
  out_.sender->messages_put.store(put_, std::memory_order_seq_cst);
  return true;
}

// The slots whose message the peer has taken. Whatever it writes there concerns messages to itself alone.
uint64_t MessageSlots::done() const noexcept {
  const uint64_t posted = put_ ^ seen_;
  if (posted == 0) return 0;
  return (out_.receiver->messages_taken.load(std::memory_order_seq_cst) ^ seen_) & posted;
}

bool MessageSlots::complete() {
  bool any = false;
  for (uint64_t left = done(); left != 0; left &= left - 1) {
    if (!any) taking_over();
    any = true;
    const auto place = static_cast<size_t>(std::countr_zero(left));
    const uint64_t bit = uint64_t{1} << place;
    if (((put_ ^ seen_) & bit) == 0) break;  // the sink ended the link meanwhile: close() completed the rest
    seen_ ^= bit;
    sink_.on_complete(works_[place], nullptr);
  }
  return any;
}

// --- Receiving

uint64_t MessageSlots::waiting(std::memory_order order) const noexcept {
  return (in_.sender->messages_put.load(order) ^ taken_) & kAllSlots;
}

Taken MessageSlots::receive() {
  uint64_t left = waiting(std::memory_order_acquire);
  if (left == 0) return Taken::kNothing;
  taking_over();
  bool any = false;
  refused_ = 0;
  for (; left != 0; left &= left - 1) {
    // Copied before anybody looks at it: the peer may go on writing.
    const auto place = static_cast<size_t>(std::countr_zero(left));
    const uint64_t bit = uint64_t{1} << place;
    const MessageSlot& slot = in_.sender->messages[place];
    const uint64_t bytes = slot.bytes.load(std::memory_order_relaxed);
    if (bytes == 0 || bytes > kMaxMessageBytes) return Taken::kOverwritten;
    std::array<uint64_t, kMaxMessageBytes / sizeof(uint64_t)> words;
    for (size_t word = 0; word * sizeof(uint64_t) < bytes; ++word) {
      words[word] = slot.words[word].load(std::memory_order_relaxed);
    }
    const bool taken = sink_.on_message(link_, std::as_bytes(std::span(words)).first(bytes));
    if (closed_) return Taken::kSome;  // by the sink
    if (!taken) {
      refused_ |= bit;
      continue;
    }
    any = true;
    taken_ ^= bit;
    handing_over();
    in_.receiver->messages_taken.store(taken_, std::memory_order_seq_cst);
  }
  return any ? Taken::kSome : Taken::kNothing;
}

bool MessageSlots::has_work() const noexcept {
  return (waiting(std::memory_order_seq_cst) & ~refused_) != 0 || done() != 0;
}

// --- The end

void MessageSlots::close(const Error& error) {
  closed_ = true;
  for (uint64_t left = put_ ^ std::exchange(seen_, put_); left != 0; left &= left - 1) {
    sink_.on_complete(works_[static_cast<size_t>(std::countr_zero(left))], &error);
  }
}

}  // namespace kvc::same_host
