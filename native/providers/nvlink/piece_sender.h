// PieceSender: what one peer has not been told yet of our memory: the pieces of regions that consist of such
// (cuda/virtual_memory.h), and regions that are gone. The link's socket carries it, each piece as a descriptor.
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

// One owner at a time: the connector, then the domain. Nothing here blocks: the control thread exports, 160 us a piece, a
// few ahead of those that are sent. A cache of 3,000 pieces is over in half a second, and nobody holds more than a few
// descriptors of it.
class PieceSender {
 public:
  // The region of this key, which stays as it is until forget().
  void tell(uint64_t key, Pieces pieces) { untold_.push_back({key, std::move(pieces), 0}); }
  // It is gone, whether the peer has heard of it or not. Returns which forget() this is, from 1 on: the peer counts them
  // (AccountWords::let_go).
  uint64_t forget(uint64_t key);

  enum class Sent : uint8_t {
    kNothing,
    kSome,
    kFull,  // the socket takes no more: again when it does
  };
  // Sends a bounded number of messages, and has the next pieces exported. `taken`: how many the peer has.
  Sent advance(const cuda::Driver& driver, const same_host::Connection& connection, uint64_t taken,
               ControlQueue& control);
  // advance() would send something, unless the socket is full, or have something exported.
  bool has_work(uint64_t taken) const noexcept;

 private:
  struct Untold {
    uint64_t key = 0;
    Pieces pieces;
    size_t next = 0;
  };
  // The next pieces of the first region, on their way through the control thread.
  struct Exported {
    std::atomic<bool> done{false};
    std::deque<UniqueFd> descriptors;  // the control thread's before; the last is none where it failed
  };

  void export_next(const cuda::Driver& driver, uint64_t pieces, ControlQueue& control);

  std::deque<Untold> untold_;
  std::shared_ptr<Exported> exported_;
  std::deque<uint64_t> forgotten_;
  uint64_t forgets_ = 0;
  uint64_t sent_ = 0;
};

}  // namespace kvc::nvlink
