// Transfer: a growing set of writes to one peer, with exactly one final event.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "engine/peer.h"
#include "engine/stream.h"
#include "engine/transfer_engine.h"

namespace kvc {

// What any thread reads of it is on cache lines apart from its reference count (see memory_region.h), from what the worker
// writes, and from the stream.
class alignas(64) Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  // What it is: a message counts against what may wait for a peer that does not read.
  enum class Kind : uint8_t { kWrites, kMessage };

  Transfer(TransferId transfer_id, std::shared_ptr<Peer> to, EventCallback on_end, Kind of_kind = Kind::kWrites)
      : id(transfer_id), peer(std::move(to)), callback(std::move(on_end)), kind(of_kind), stream(*this) {
    // Sequentially consistent, beside the look at the peer's state: see PeerDisconnects.
    peer->transfers.fetch_add(1, std::memory_order_seq_cst);
    if (kind == Kind::kMessage) peer->messages.fetch_add(1, std::memory_order_relaxed);
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer() {
    if (kind == Kind::kMessage) peer->messages.fetch_sub(1, std::memory_order_relaxed);
    peer->transfers.fetch_sub(1, std::memory_order_seq_cst);
  }

  const TransferId id;
  const std::shared_ptr<Peer> peer;
  const EventCallback callback;
  const Kind kind;
  std::atomic<uint32_t> armed_slices{0};  // of armed lists, that wait or are in flight
  alignas(64) Progress progress;

  // The worker's.
  struct OwnStream : Stream {
    explicit OwnStream(Transfer& of) : Stream(Stream::Kind::kTransfer, *of.peer, &of.progress), transfer(of) {}
    // All slices with values up to this one are in the peer's memory.
    bool drained(uint64_t signal_value) const { return undrained.empty() || undrained.begin()->first > signal_value; }
    Transfer& transfer;
    std::map<uint64_t, uint32_t> undrained;  // slices of armed lists by their value
  };
  alignas(64) OwnStream stream;
};

}  // namespace kvc
