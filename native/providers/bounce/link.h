// Link: what a bounce domain knows of one peer. The domain does the work; no thread of its own, no lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/domain.h"
#include "providers/bounce/slot_memory.h"
#include "providers/bounce/wire.h"

namespace kvc::bounce {

// A batch that the group posted, until all its pieces are in place at the peer.
struct Batch {
  WorkId work = 0;
  uint64_t rkey = 0;
  uint64_t page_bytes = 0;
  bool counted = false;
  uint32_t immediate = 0;
  std::vector<PageWrite> pages;

  size_t next_page = 0;    // the first that no slot has yet
  uint64_t next_byte = 0;  // and of a page that is larger than a slot, where in it
  uint32_t under_way = 0;  // slots that hold pieces of it
  std::optional<Error> error;

  bool all_taken() const noexcept { return next_page == pages.size(); }
};

// A slot of the peer's that we have filled, or are filling.
struct Outgoing {
  uint64_t batch = 0;      // its key in Link::batches
  uint32_t pool_slot = 0;  // where the pieces are gathered here
  uint64_t bytes = 0;      // of header and pieces
  bool gathered = false;   // and so may be posted
  bool posted = false;     // on the lane below
  bool written = false;    // and through: the pool has its slot again
  bool emptied = false;    // so the peer says
  Outcome outcome = Outcome::kInPlace;
};

// A slot of ours that the peer has announced as full, until it is told that it is empty again. What its header said
// when it was judged: the peer can still write there.
struct Arrival {
  uint64_t rkey = 0;
  bool counted = false;
  uint32_t immediate = 0;
};

struct Link {
  Link(LinkId link_id, std::unique_ptr<SlotMemory> slots, uint64_t slots_rkey)
      : id(link_id), memory(std::move(slots)), rkey(slots_rkey) {}

  const LinkId id;

  // --- Receiving
  std::unique_ptr<SlotMemory> memory;  // ours, which the peer fills
  const uint64_t rkey;                 // its key on the lane below
  std::deque<uint32_t> full;           // slots that wait to be emptied
  std::array<std::optional<Arrival>, kSlots> arrivals;
  uint32_t landing = 0;    // of them, with the GPU
  std::deque<Note> notes;  // that the lane below had no room for

  // --- Sending
  bool ready = false;  // the peer's slots are known
  uint64_t peer_rkey = 0;
  uint64_t peer_base = 0;
  std::unordered_map<uint64_t, Batch> batches;
  std::deque<uint64_t> queue;  // those of `batches` with pieces that no slot has yet
  std::array<std::optional<Outgoing>, kSlots> out;

  // --- The end
  std::optional<Error> broken{};  // what the peer did; becomes `closed` in the domain's turn
  std::optional<Error> closed{};
  bool fenced_below = false;
};

}  // namespace kvc::bounce
