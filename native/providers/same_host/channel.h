// One direction of a link, in memory that both processes map: the words that every lane has.
//
// A lane's Channel is ReceiverWords, a line of its own words, SenderWords. Its own words say which writes are under way
// (host/wire.h: the gate; nvlink/wire.h: the account), and whether the sender starves.
//
// Trust: both processes belong to one user, who could attach a debugger to either. Nothing here is a security
// boundary, but a peer that crashes or scribbles costs its link and nothing else: whatever a peer can write is
// loaded once, checked, and then used; and each word has one writer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "lane/domain.h"

#if defined(KVC_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

namespace kvc::same_host {

// Immediates under way in one direction. One stands for up to 64 pages, so 4,096 are 1 GiB of 4 KiB pages: a
// receiver has 100 ms to come by before a processor that copies at full speed waits. They are 4 GiB of 16 KiB
// pages, for which a GPU leaves it 10 ms. 16 KiB of memory a direction.
constexpr uint32_t kRingEntries = 4096;
static_assert((kRingEntries & (kRingEntries - 1)) == 0, "positions are masked");

using SharedWord = std::atomic<uint64_t>;
static_assert(SharedWord::is_always_lock_free, "a lock would not be shared between processes");

// A message that the receiver's engine has not taken. Its words are atomic because the other process may write them at
// any time: whatever it does must not be undefined here.
struct MessageSlot {
  SharedWord bytes;
  SharedWord words[kMaxMessageBytes / sizeof(uint64_t)];
};

// Whether the sender may write.
enum class Admission : uint64_t {
  kPending = 0,  // the receiver's domain does not have the link yet: it says kWake when it does
  kOpen = 1,
  kRevoked = 2,  // fenced, for good; so is whatever else is found there
};

// Written by the receiver.
struct ReceiverWords {
  alignas(64) SharedWord admission;
  SharedWord head;            // immediates taken out so far
  SharedWord messages_taken;  // a bit a slot: equal to that of `messages_put` once its message was taken

  void admit(Admission value) noexcept { admission.store(static_cast<uint64_t>(value), std::memory_order_seq_cst); }
  Admission admitted() const noexcept {
    const uint64_t value = admission.load(std::memory_order_seq_cst);
    return value <= 1 ? static_cast<Admission>(value) : Admission::kRevoked;
  }
};
static_assert(sizeof(ReceiverWords) == 64);

// Written by the sender. `tail` is what the receiver polls: a line apart from the lane's own words.
struct SenderWords {
  alignas(64) SharedWord tail;  // immediates put in so far
  SharedWord messages_put;      // a bit a slot: it changes with each message that is put there
  alignas(64) std::atomic<uint32_t> ring[kRingEntries];
  alignas(64) MessageSlot messages[kMessageSlots];  // 64 KiB, of which a link without messages touches nothing
};

// A lane's Channel, as ImmediateRing and MessageSlots see it. Owns nothing: the segment outlives it.
struct Direction {
  ReceiverWords* receiver = nullptr;
  SenderWords* sender = nullptr;
  SharedWord* starved = nullptr;  // 1: the ring is full and the sender sleeps: wake it when there is room
};
template <typename Channel>
Direction direction_of(Channel& channel) noexcept {
  return {&channel, &channel, &channel.starved};
}

// What a look at the peer's words found.
enum class Taken : uint8_t {
  kNothing,
  kSome,
  kOverwritten,  // words that no peer writes that is in its senses
};

// Two mappings of one segment have two addresses, and the thread sanitizer goes by address: it cannot see that a
// load here pairs with a store there. Between two engines of one process these say so; elsewhere they are nothing.
#if defined(KVC_THREAD_SANITIZER)
inline char tsan_key;
inline void handing_over() noexcept { __tsan_release(&tsan_key); }  // before the store that publishes
inline void taking_over() noexcept { __tsan_acquire(&tsan_key); }   // after the load that sees it
#else
inline void handing_over() noexcept {}
inline void taking_over() noexcept {}
#endif

}  // namespace kvc::same_host
