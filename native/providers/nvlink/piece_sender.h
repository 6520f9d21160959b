// PieceSender: the announcements of our memory that one peer has not received yet: the pieces of regions that consist
// of pieces (cuda/virtual_memory.h), and regions that are gone. The link's socket carries them, each piece as a
// descriptor.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/unique_fd.h"
#include "lane/control_queue.h"
#include "providers/nvlink/region.h"
#include "providers/nvlink/wire.h"
#include "providers/same_host/connection.h"

namespace kvc::nvlink {

// One owner at a time: the connector, then the domain. Nothing here blocks: the control thread exports the pieces, 160
// us each, a few ahead of those that are sent. A cache of 3,000 pieces takes half a second, during which no process
// holds more than a few descriptors of it.
class PieceSender {
 public:
  // Queues the pieces of the region of this key. The region must not change until forget().
  void tell(uint64_t key, Pieces pieces) { untold_.push_back({key, std::move(pieces), 0}); }
  // Announces that the region is gone, whether or not the peer has received it. Returns the number of this forget(),
  // counted from 1: the peer counts them (AccountWords::let_go).
  uint64_t forget(uint64_t key);

  enum class Sent : uint8_t {
    kNothing,
    kSome,
    kFull,  // the socket is full: call again when it is writable
  };
  // Sends a bounded number of messages, and starts the export of the next pieces. `taken` is how many pieces the peer
  // has taken.
  Sent advance(const cuda::Driver& driver, const same_host::Connection& connection, uint64_t taken,
               ControlQueue& control);
  // Whether advance() would send a message (unless the socket is full) or start an export.
  bool has_work(uint64_t taken) const noexcept;

 private:
  struct Untold {
    uint64_t key = 0;
    Pieces pieces;
    size_t next = 0;
  };
  // The next pieces of the first region, while the control thread exports them.
  struct Exported {
    std::atomic<bool> done{false};
    // written by the control thread until `done`; the last one is invalid if the export failed
    std::deque<UniqueFd> descriptors;
  };

  void export_next(const cuda::Driver& driver, uint64_t pieces, ControlQueue& control);

  std::deque<Untold> untold_;
  std::shared_ptr<Exported> exported_;
  std::deque<uint64_t> forgotten_;
  uint64_t forgets_ = 0;
  uint64_t sent_ = 0;
};

}  // namespace kvc::nvlink
