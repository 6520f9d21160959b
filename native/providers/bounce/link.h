// Link: what a bounce domain knows of one peer. The domain does the work, and alone.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lane/domain.h"
#include "providers/bounce/connector.h"
#include "providers/bounce/wire.h"

namespace kvc::bounce {

// A batch that the engine posted, until all its pieces are in place at the peer.
struct Batch {
  WorkId work = 0;
  uint64_t rkey = 0;
  uint64_t page_bytes = 0;
  bool counted = false;
  bool in_gpu = false;
  uint32_t immediate = 0;
  std::vector<PageWrite> pages;

  size_t next_page = 0;    // the first that no slot has yet
  uint64_t next_byte = 0;  // and of a page that is larger than a slot, where in it
  uint32_t under_way = 0;  // slots that hold pieces of it
  std::optional<Error> error{};

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
  Region* region = nullptr;
  bool counted = false;
  uint32_t immediate = 0;
};

struct Link {
  Link(LinkId link_id, const LinkSlots& slots)
      : id(link_id), memory(slots.memory), peer_rkey(slots.peer_rkey), peer_base(slots.peer_base) {}

  const LinkId id;
  uint32_t flying = 0;  // copies that the GPU has for it, either way

  // --- Receiving
  const std::shared_ptr<SlotMemory> memory;  // ours, which the peer fills
  std::deque<uint32_t> full;                 // slots that wait to be emptied
  std::array<std::optional<Arrival>, kSlots> arrivals;
  std::deque<Note> notes;  // that the lane below had no room for
  uint32_t untold = 0;     // notes that it has, and the peer not yet

  // --- Sending
  const uint64_t peer_rkey;  // the peer's slots
  const uint64_t peer_base;
  std::unordered_map<uint64_t, Batch> batches;
  std::deque<uint64_t> queue;  // those of `batches` with pieces that no slot has yet
  std::array<std::optional<Outgoing>, kSlots> out;

  // --- The end
  std::optional<Error> broken{};  // what went wrong; becomes `closed` in the domain's turn
  std::optional<Error> closed{};  // nothing is taken from it or for it any more
  std::optional<std::chrono::steady_clock::time_point> last_word{};  // until when its notes are waited for
};

}  // namespace kvc::bounce
