// What two bounce domains say to each other: a slot's header, and the immediates of the lane below.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "base/error.h"
#include "lane/immediate.h"

namespace kvc::bounce {

constexpr uint32_t kVersion = 1;
constexpr uint32_t kMagic = 0x6B766362;  // "kvcb": whose bytes a handshake is

// A batch of the group's fits one slot: 64 pages of 16 KiB, 16 of 64 KiB. 1 MiB is 20 us of PCIe 5 and 80 us of a
// 100 Gb/s NIC: long beside what a launch and a message cost.
constexpr uint64_t kSlotBytes = 1 << 20;
// Slots of one direction of a link, on the receiving side: while one is on the wire, others are filled, emptied and
// told of. 8 MiB a link and direction, page-locked.
constexpr uint32_t kSlots = 8;

// What a slot begins with; its pieces follow at kHeaderBytes, back to back.
struct SlotHeader {
  uint64_t rkey = 0;
  uint64_t piece_bytes = 0;
  uint32_t pieces = 0;     // with piece_bytes 0: none to write, and what the immediate stands for
  uint32_t immediate = 0;  // the user's, if `counted`
  uint32_t counted = 0;
  uint32_t reserved = 0;
  uint64_t offsets[Immediate::kMaxMultiplicity] = {};  // of the pieces, in the region
};
static_assert(std::is_trivially_copyable_v<SlotHeader> && sizeof(SlotHeader) == 544);
static_assert(std::endian::native == std::endian::little, "slots travel as they lie in memory");
constexpr uint64_t kHeaderBytes = 576;  // the next line of the cache: pieces are aligned for the GPU's bulk copies
constexpr uint64_t kSlotStride = kSlotBytes + 4096;
static_assert(kHeaderBytes >= sizeof(SlotHeader) && kHeaderBytes + kSlotBytes <= kSlotStride);

// What became of a slot.
enum class Outcome : uint8_t {
  kInPlace,
  kUnknownRegion,  // the key is none of ours, or was revoked
  kOutOfRange,
  kFailed,  // the GPU's copy did
};

// The lane below raises no counters: its immediates are notes.
struct Note {
  bool emptied = false;  // false: the slot is full
  uint32_t slot = 0;
  Outcome outcome = Outcome::kInPlace;  // of an emptied one

  uint32_t encode() const noexcept {
    const uint32_t word = slot | static_cast<uint32_t>(outcome) << 8 | (emptied ? 1U << 15 : 0U);
    return Immediate{word, 0, 1}.encode();
  }
  // None if no peer of ours says so.
  static std::optional<Note> decode(uint32_t raw) noexcept {
    const uint32_t word = Immediate::decode(raw).slot;
    const uint32_t outcome = word >> 8 & 0x7F;
    const Note note{(word >> 15) != 0, word & 0xFF, static_cast<Outcome>(outcome)};
    if (note.slot >= kSlots || outcome > static_cast<uint32_t>(Outcome::kFailed)) return std::nullopt;
    return note;
  }
};

}  // namespace kvc::bounce
