// Link: a bounce domain's state of one peer. Only the domain uses it.
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

// A batch that the transfer engine has posted, until all its pieces are in place at the peer.
struct Batch {
  WorkId work = 0;
  uint64_t rkey = 0;
  uint64_t page_bytes = 0;
  bool counted = false;
  bool in_gpu = false;
  uint32_t immediate = 0;
  std::vector<PageWrite> pages;

  size_t next_page = 0;    // the first page that is not in a slot yet
  uint64_t next_byte = 0;  // offset of the next piece in that page, if the page is larger than a slot
  uint32_t under_way = 0;  // slots that hold pieces of it
  std::optional<Error> error{};

  bool all_taken() const noexcept { return next_page == pages.size(); }
};

// A slot of the peer that this side has filled or is filling.
struct Outgoing {
  uint64_t batch = 0;      // key in Link::batches
  uint32_t pool_slot = 0;  // slot of the pool in which the pieces are gathered
  uint64_t bytes = 0;      // of header and pieces
  bool gathered = false;   // may be posted
  bool posted = false;     // posted on the lower lane
  bool written = false;    // the lower lane has completed it: the pool slot is free again
  bool emptied = false;    // the peer has reported it empty
  Outcome outcome = Outcome::kInPlace;
};

// One of our slots that the peer has announced as full, until this side has reported it empty. The fields are copies of
// the header as it was checked, because the peer can still write there.
struct Arrival {
  Region* region = nullptr;
  bool counted = false;
  uint32_t immediate = 0;
};

struct Link {
  Link(LinkId link_id, const LinkSlots& slots)
      : id(link_id), memory(slots.memory), peer_rkey(slots.peer_rkey), peer_base(slots.peer_base) {}

  const LinkId id;
  uint32_t flying = 0;  // copies in either direction that the GPU executes for the link

  // --- Receiving
  const std::shared_ptr<SlotMemory> memory;  // our slots, which the peer fills
  std::deque<uint32_t> full;                 // slots that wait to be emptied
  std::array<std::optional<Arrival>, kSlots> arrivals;
  std::deque<Note> notes;  // notes for which the lower lane had no room
  uint32_t untold = 0;     // notes posted on the lower lane and not completed

  // --- Sending
  const uint64_t peer_rkey;  // key of the peer's slots
  const uint64_t peer_base;
  std::unordered_map<uint64_t, Batch> batches;
  std::deque<uint64_t> queue;  // keys of `batches` with pieces that are not in a slot yet
  std::array<std::optional<Outgoing>, kSlots> out;

  // --- The end
  std::optional<Error> broken{};  // the error that occurred; becomes `closed` in the domain's next turn
  std::optional<Error> closed{};  // the link is closed: nothing is received from it or sent over it any more
  std::optional<std::chrono::steady_clock::time_point> last_word{};  // deadline for its notes to leave
};

}  // namespace kvc::bounce
