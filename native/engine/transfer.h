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

// The fields that any thread reads are on cache lines of their own. They are apart from the reference count
// (memory_region.h), from the fields that the transfer thread writes, and from the stream.
class alignas(64) Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  // The kind of transfer. Messages count against the limit for peers that do not read.
  enum class Kind : uint8_t { kWrites, kMessage };

  Transfer(TransferId transfer_id, std::shared_ptr<Peer> to, EventCallback on_end, Kind of_kind = Kind::kWrites)
      : id(transfer_id), peer(std::move(to)), callback(std::move(on_end)), kind(of_kind), stream(*this) {
    // Sequentially consistent with the later read of the peer's state: see PeerDisconnects.
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
  std::atomic<uint32_t> armed_slices{0};  // slices of armed lists that wait or are in flight
  alignas(64) Progress progress;

  // Used on the transfer thread.
  struct OwnStream : Stream {
    explicit OwnStream(Transfer& of) : Stream(Stream::Kind::kTransfer, *of.peer, &of.progress), transfer(of) {}
    // True if all slices with values up to this one are in the peer's memory.
    bool drained(uint64_t signal_value) const { return undrained.empty() || undrained.begin()->first > signal_value; }
    Transfer& transfer;
    std::map<uint64_t, uint32_t> undrained;  // number of slices of armed lists, by value
  };
  alignas(64) OwnStream stream;
};

}  // namespace kvc
