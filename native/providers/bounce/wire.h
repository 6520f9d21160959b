// The bytes that two bounce domains exchange: a slot's header, and the immediates of the lower lane.
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
constexpr uint32_t kMagic = 0x6B766362;  // "kvcb": marks the bytes of a handshake

// One batch fits one slot: 64 pages of 16 KiB, 16 pages of 64 KiB. 1 MiB takes 20 us of PCIe 5 and 80 us of a 100 Gb/s
// NIC, which is long compared with a launch and a message.
constexpr uint64_t kSlotBytes = 1 << 20;
// Slots of one direction of a link, on the receiving side. While one is on the wire, others are filled, emptied and
// reported. They take 8 MiB per link and direction, page-locked.
constexpr uint32_t kSlots = 8;

// The beginning of a slot. Its pieces follow at kHeaderBytes, back to back.
struct SlotHeader {
  uint64_t rkey = 0;
  uint64_t piece_bytes = 0;
  // if piece_bytes is 0, nothing is written, and this is the number of pages that the immediate counts
  uint32_t pieces = 0;
  uint32_t immediate = 0;  // the transfer engine's immediate, if `counted`
  uint32_t counted = 0;
  uint32_t reserved = 0;
  uint64_t offsets[Immediate::kMaxMultiplicity] = {};  // offsets of the pieces in the region
};
static_assert(std::is_trivially_copyable_v<SlotHeader> && sizeof(SlotHeader) == 544);
static_assert(std::endian::native == std::endian::little, "slots travel as they lie in memory");
constexpr uint64_t kHeaderBytes = 576;  // the next cache line: pieces are aligned for the GPU's bulk copies
constexpr uint64_t kSlotStride = kSlotBytes + 4096;
static_assert(kHeaderBytes >= sizeof(SlotHeader) && kHeaderBytes + kSlotBytes <= kSlotStride);

// The outcome of a slot.
enum class Outcome : uint8_t {
  kInPlace,
  kUnknownRegion,  // the key is unknown, or was revoked
  kOutOfRange,
  kFailed,  // the GPU's copy failed
};

// A note about a slot. The lower lane raises no counters, so its immediates carry the notes.
struct Note {
  bool emptied = false;  // false: the slot is full
  uint32_t slot = 0;
  Outcome outcome = Outcome::kInPlace;  // of an emptied slot

  uint32_t encode() const noexcept {
    const uint32_t word = slot | static_cast<uint32_t>(outcome) << 8 | (emptied ? 1U << 15 : 0U);
    return Immediate{word, 0, 1}.encode();
  }
  // Returns nothing for an immediate that no correct peer sends.
  static std::optional<Note> decode(uint32_t raw) noexcept {
    const uint32_t word = Immediate::decode(raw).slot;
    const uint32_t outcome = word >> 8 & 0x7F;
    const Note note{(word >> 15) != 0, word & 0xFF, static_cast<Outcome>(outcome)};
    if (note.slot >= kSlots || outcome > static_cast<uint32_t>(Outcome::kFailed)) return std::nullopt;
    return note;
  }
};

}  // namespace kvc::bounce
