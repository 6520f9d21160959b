// One direction of a link, in memory that both processes map: the words that all lanes of one machine share.
//
// A lane's Channel consists of ReceiverWords, one cache line of the lane's own words, and SenderWords. The lane's own
// words contain which writes are in flight (host/wire.h: the gate; nvlink/wire.h: the account), and whether the sender
// starves.
//
// Trust: both processes belong to one user, who could attach a debugger to either. Nothing here is a security boundary.
// But a peer that crashes or scribbles costs its link and nothing else. A word that a peer can write is loaded once,
// checked, and only then used. Each word has one writer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "lane/domain.h"

#if defined(KVC_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

namespace kvc::same_host {

// Immediates in flight in one direction. One immediate counts up to 64 pages, so 4,096 of them count 1 GiB of 4 KiB
// pages. A receiver has 100 ms to poll before a processor that copies at full speed waits. With 16 KiB pages they count
// 4 GiB, for which a GPU leaves the receiver 10 ms. The ring takes 16 KiB of memory per direction.
constexpr uint32_t kRingEntries = 4096;
static_assert((kRingEntries & (kRingEntries - 1)) == 0, "positions are masked");

using SharedWord = std::atomic<uint64_t>;
static_assert(SharedWord::is_always_lock_free, "a lock would not be shared between processes");

// A message that the receiver's engine has not taken. Its words are atomic because the other process may write them at
// any time, and no such write may cause undefined behaviour here.
struct MessageSlot {
  SharedWord bytes;
  SharedWord words[kMaxMessageBytes / sizeof(uint64_t)];
};

// Whether the sender may write.
enum class Admission : uint64_t {
  kPending = 0,  // the receiver's domain has not attached the link; it sends kWake when it has
  kOpen = 1,
  kRevoked = 2,  // fenced for good; every other value counts as kRevoked
};

// Written by the receiver.
struct ReceiverWords {
  alignas(64) SharedWord admission;
  SharedWord head;            // count of immediates taken out
  SharedWord messages_taken;  // a bit per slot, equal to the bit of `messages_put` once the slot's message was taken

  void admit(Admission value) noexcept { admission.store(static_cast<uint64_t>(value), std::memory_order_seq_cst); }
  Admission admitted() const noexcept {
    const uint64_t value = admission.load(std::memory_order_seq_cst);
    return value <= 1 ? static_cast<Admission>(value) : Admission::kRevoked;
  }
};
static_assert(sizeof(ReceiverWords) == 64);

// Written by the sender. The receiver polls `tail`, so it lies on another cache line than the lane's own words.
struct SenderWords {
  alignas(64) SharedWord tail;  // count of immediates put in
  SharedWord messages_put;      // a bit per slot, which flips with each message put into the slot
  alignas(64) std::atomic<uint32_t> ring[kRingEntries];
  alignas(64) MessageSlot messages[kMessageSlots];  // 64 KiB, which stay untouched on a link without messages
};

// A lane's Channel, as ImmediateRing and MessageSlots use it. Owns nothing: the segment outlives it.
struct Direction {
  ReceiverWords* receiver = nullptr;
  SenderWords* sender = nullptr;
  SharedWord* starved = nullptr;  // 1: the ring is full and the sender sleeps: wake it when there is room
};
template <typename Channel>
Direction direction_of(Channel& channel) noexcept {
  return {&channel, &channel, &channel.starved};
}

// The result of a look at the peer's words.
enum class Taken : uint8_t {
  kNothing,
  kSome,
  kOverwritten,  // holds values that no correct peer writes
};

// Two mappings of one segment have two addresses, and the thread sanitizer goes by address. So it cannot see that a
// load here pairs with a store there. For two engines in one process, these calls declare the pair. In builds without
// the sanitizer they do nothing.
#if defined(KVC_THREAD_SANITIZER)
inline char tsan_key;
inline void handing_over() noexcept { __tsan_release(&tsan_key); }  // before the store that publishes
inline void taking_over() noexcept { __tsan_acquire(&tsan_key); }   // after the load that sees it
#else
inline void handing_over() noexcept {}
inline void taking_over() noexcept {}
#endif

}  // namespace kvc::same_host
