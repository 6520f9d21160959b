#include "providers/same_host/message_slots.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <optional>

namespace kvc::same_host {

namespace {

constexpr uint64_t kAllSlots = (uint64_t{1} << kMessageSlots) - 1;

constexpr uint64_t bit(uint32_t slot) noexcept { return uint64_t{1} << slot; }

}  // namespace

// --- Sending

bool MessageSlots::put(WorkId work, std::span<const std::byte> message) noexcept {
  const std::optional<uint32_t> place = sent_.put(work);
  if (!place) return false;
  MessageSlot& slot = out_.sender->messages[*place];
  for (size_t at = 0; at < message.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, message.data() + at, std::min(sizeof(word), message.size() - at));
    slot.words[at / sizeof(word)].store(word, std::memory_order_relaxed);
  }
  slot.bytes.store(message.size(), std::memory_order_relaxed);
  put_ ^= bit(*place);
  handing_over();
  out_.sender->messages_put.store(put_, std::memory_order_seq_cst);
  return true;
}

// Returns the slots whose message the peer has taken. Nonsense that the peer writes there affects only messages to the
// peer itself.
uint64_t MessageSlots::done() const noexcept {
  const uint64_t used = sent_.used();
  if (used == 0) return 0;
  return used & ~(out_.receiver->messages_taken.load(std::memory_order_seq_cst) ^ put_);
}

bool MessageSlots::complete() {
  uint64_t left = done();
  if (left == 0) return false;
  taking_over();
  for (; left != 0; left &= left - 1) completions_.done(*sent_.take(static_cast<uint32_t>(std::countr_zero(left))));
  return true;
}

// --- Receiving

// Returns the slots to look at: those with a message that was not reported, and those whose message vanished although
// it was not taken.
uint64_t MessageSlots::arrived(std::memory_order order) const noexcept {
  return ((in_.sender->messages_put.load(order) ^ taken_) & kAllSlots) ^ handed_;
}

Taken MessageSlots::receive() {
  uint64_t left = arrived(std::memory_order_acquire);
  if (left == 0) return Taken::kNothing;
  if ((left & handed_) != 0) return Taken::kOverwritten;
  taking_over();
  for (; left != 0; left &= left - 1) {
    // The message is copied before it is used: the peer may go on writing.
    const auto place = static_cast<uint32_t>(std::countr_zero(left));
    const MessageSlot& slot = in_.sender->messages[place];
    const uint64_t bytes = slot.bytes.load(std::memory_order_relaxed);
    if (bytes == 0 || bytes > kMaxMessageBytes) return Taken::kOverwritten;
    std::array<uint64_t, kMaxMessageBytes / sizeof(uint64_t)> words;
    for (size_t word = 0; word * sizeof(uint64_t) < bytes; ++word) {
      words[word] = slot.words[word].load(std::memory_order_relaxed);
    }
    handed_ |= bit(place);
    completions_.message(link_, place, std::as_bytes(std::span(words)).first(bytes));
  }
  return Taken::kSome;
}

void MessageSlots::take(uint32_t slot) noexcept {
  handed_ &= ~bit(slot);
  taken_ ^= bit(slot);
  handing_over();
  in_.receiver->messages_taken.store(taken_, std::memory_order_seq_cst);
}

// --- The end

void MessageSlots::fail(const Error& error) {
  sent_.clear([&](WorkId work) { completions_.failed(work, error); });
}

}  // namespace kvc::same_host
