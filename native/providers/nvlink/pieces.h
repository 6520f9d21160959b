// Memory that consists of pieces (cuda/virtual_memory.h), from one end of a link to the other: each piece's descriptor
// travels over the link's socket, in order, and is mapped on arrival.
//
// One at a time: an export takes 160 us and a mapping 80 us, as long as a worker's turn should. A cache of 3,000 pieces
// is over in half a second, and nobody holds more than a few descriptors of it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "cuda/virtual_memory.h"
#include "engine/error.h"
#include "engine/unique_fd.h"
#include "providers/nvlink/peer_memory.h"
#include "providers/nvlink/wire.h"
#include "providers/same_host/connection.h"

namespace kvc::nvlink {

// What one peer has not been told yet of our memory. Worker thread only; nothing here blocks.
class PieceSender {
 public:
  using Pieces = std::shared_ptr<const std::vector<cuda::Piece>>;  // at least one; mapped until forget()

  void tell(uint32_t memory, Pieces pieces) { untold_.push_back({memory, std::move(pieces)}); }
  // `memory` backs no region any more.
  void forget(uint32_t memory);
  // Sends one message, if there is one to send and room for it; true if it did. `taken`: how many the peer has.
  bool advance(const cuda::Driver& driver, const same_host::Connection& connection, uint64_t taken);
  // advance() would do something, unless the socket is full.
  bool has_work(uint64_t taken) const noexcept {
    return !forgotten_.empty() || (!untold_.empty() && sent_ - taken < kUntakenPieces);
  }
  // The link has ended.
  void close() noexcept;

 private:
  struct Untold {
    uint32_t memory = 0;
    Pieces pieces;
    size_t next = 0;
  };
  std::deque<Untold> untold_;
  UniqueFd exported_;  // the next piece's, while the socket is full
  std::deque<uint32_t> forgotten_;
  uint64_t sent_ = 0;
};

// Memory of a peer that arrives, and is mapped here, piece by piece.
class PiecedAllocation final : public PeerAllocation {
 public:
  explicit PiecedAllocation(cuda::PieceMapping mapping) : mapping_(std::move(mapping)) {}
  cuda::DevicePointer base() const noexcept override { return mapping_.base(); }
  bool unmap_part() noexcept override;
  cuda::PieceMapping& mapping() noexcept { return mapping_; }

 private:
  cuda::PieceMapping mapping_;
};

// What one peer has told us of its memory. Whatever it says is checked: it may be out of its senses. Worker thread only;
// nothing here blocks.
class PieceReceiver {
 public:
  struct Memory {
    uint64_t rkey = 0;
    std::shared_ptr<PiecedAllocation> allocation;  // null: failed before there was one
    std::optional<Error> failed{};                 // and no batch can be written there
    bool arrived() const noexcept { return failed || allocation->mapping().complete(); }
  };

  // A kMemory of the peer. False: it makes no sense.
  bool hear(const same_host::Message& message, UniqueFd descriptor);
  // Descriptors have come that are not mapped yet.
  bool has_work() const noexcept { return !inbox_.empty(); }
  // Maps one of them for the context's GPU; `board` is the peer's. False: the peer must be out of its senses.
  bool map_next(const std::shared_ptr<cuda::Context>& context, const Board& board);
  // How many the peer may regard as taken.
  uint64_t taken() const noexcept { return taken_; }
  // Null: nothing of this name has arrived.
  const Memory* find(uint32_t memory) const noexcept;
  // What was the first to fail, before anything could be mapped.
  const Error* cannot_map() const noexcept { return cannot_map_ ? &*cannot_map_ : nullptr; }
  // A kForget of the peer: its memory as far as it is mapped, or none. Its last use is the caller's to know.
  std::optional<Memory> forget(uint32_t memory);
  // The link has ended: all that is mapped.
  std::vector<Memory> close();

 private:
  struct Arrival {
    uint32_t memory = 0;
    uint64_t bytes = 0;
    UniqueFd descriptor;
  };
  static Memory begin(const std::shared_ptr<cuda::Context>& context, const RegionEntry& entry, uint64_t rkey);
  void fail(Memory& memory, Error error);

  std::deque<Arrival> inbox_;
  std::unordered_map<uint32_t, Memory> memories_;
  uint64_t taken_ = 0;
  bool mapped_any_ = false;
  std::optional<Error> cannot_map_;
};

}  // namespace kvc::nvlink
