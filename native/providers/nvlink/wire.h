// The state that two nvlink domains share beside same_host/: the memory that both map, and the bytes of a handshake.
//
// Board    one per domain, written by that domain only, sealed read-only for all other processes: which regions exist,
//          how to map them, and whether its thread sleeps. Messages name a region by its place there.
// Segment  one per link: a Channel for each direction.
// Channel  one direction of a link: a ring of immediates, slots of messages, and the account of batches in flight.
//
// Memory that no IPC handle names is in pieces. The link's socket carries them as descriptors (kMemory), once the two
// domains are connected and later as regions are registered. When a region is revoked, each peer receives a kForget: it
// lets its copies end, unmaps the region, and reports that in `let_go`. Until then the region's memory may not be
// freed, nor its place be used again. No peer maps memory of a domain that does not have the link yet
// (Admission::kPending), because that domain could not send it a kForget.
//
// Pages go from GPU to GPU. Only counts, messages and this bookkeeping pass through the processors.
//
// The account makes fencing sound, in the normal case without the peer's cooperation. A sender writes a batch in these
// steps:
// - raise `entered`
// - look at `admission` and at the region's key
// - give the batch to the GPU
// - put the immediate into the ring when the GPU has finished
// - raise `left`
// The receiver first revokes and then reads `entered`, both sequentially consistent. A batch that entered before is
// waited for, until `left` has reached the value that was read. A batch that enters later sees the revocation. After
// the wait, the ring holds all that will ever be counted. A peer whose process is gone has no batch in flight: the
// driver stops a process's GPU work before the process ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/driver.h"
#include "providers/same_host/channel.h"
#include "providers/same_host/lane.h"
#include "providers/same_host/wire.h"

namespace kvc::nvlink {

using same_host::SharedWord;

constexpr uint32_t kVersion = 3;
constexpr uint32_t kMagic = 0x6B76636E;  // "kvcn": marks the bytes of this lane

// The most regions of one domain: a few for KV caches, and thousands for a model's weights with each tensor a region. A
// board is 2 MiB, and only entries that were used once have memory behind them. A peer that reads other entries makes
// the kernel allocate the rest.
constexpr uint32_t kMaxRegions = 16384;
// Returns the place of a key's region on its owner's board.
constexpr uint32_t place_of(uint64_t rkey) noexcept { return static_cast<uint32_t>(rkey % kMaxRegions); }

// The pieces of a region's memory (cuda/virtual_memory.h) that were sent to a peer and not taken yet. There are enough
// that both sides work at a time. There are few enough that peers which hang do not use up the descriptors that a user
// may have in flight (RLIMIT_NOFILE, often 1024, over all sockets).
constexpr uint32_t kUntakenPieces = 16;

struct RegionEntry {
  SharedWord rkey;  // 0: no region. Written last; stays 0 until no sender can be using the entry any more.
  SharedWord base;  // the first address, in the domain's process
  SharedWord length;
  SharedWord offset;        // offset of `base` in its allocation, or in its first piece
  SharedWord device;        // the GPU's ordinal in that process, for a peer in the same process
  SharedWord pieces_bytes;  // 0: `allocation` names it. Otherwise it is in pieces of this many bytes in all
  cuda::IpcHandle allocation;
  uint64_t padding[2];
};
static_assert(sizeof(RegionEntry) == 128);

struct Board {
  // Odd: the domain's thread sleeps (or is about to) and wants kWake after anything new. Each sleep has a new number,
  // so that a sender wakes it once. Sequentially consistent with Channel::tail and messages_put.
  alignas(64) SharedWord sleep;
  uint64_t process = 0;  // random, one per process: identifies the peers in the same address space
  SharedWord places;     // places from here on were never used
  alignas(128) RegionEntry regions[kMaxRegions];

  // Returns null if the board has no region of this key. The entry may change at any time.
  const RegionEntry* find(uint64_t rkey) const noexcept {
    const uint32_t place = place_of(rkey);
    if (rkey == 0 || place >= places.load(std::memory_order_acquire)) return nullptr;
    return regions[place].rkey.load(std::memory_order_seq_cst) == rkey ? &regions[place] : nullptr;
  }
};
static_assert(offsetof(Board, sleep) == 0, "where Sleep and Connection look for it");

// The sender's account of its batches.
struct AccountWords {
  alignas(64) SharedWord entered;  // count of batches; those up to `entered` and above `left` may be landing
  SharedWord left;
  SharedWord starved;       // 1: the ring is full and the sender sleeps; wake it when there is room
  SharedWord pieces_taken;  // count of the receiver's pieces that are out of the socket, and mapped
  SharedWord let_go;  // count of the receiver's kForgets that are done: their regions are not mapped here any more
};
// The value of AccountWords::let_go once the link has ended here: nothing of the receiver's memory is mapped any more.
constexpr uint64_t kAllLetGo = UINT64_MAX;

struct Channel : same_host::ReceiverWords, AccountWords, same_host::SenderWords {};
static_assert(sizeof(Channel) == sizeof(same_host::ReceiverWords) + 64 + sizeof(same_host::SenderWords));

struct Segment {
  Channel to_offerer;
  Channel to_acceptor;
};

struct Offer : same_host::Invitation {
  uint64_t process = 0;  // Board::process of the offerer
};
static_assert(std::is_trivially_copyable_v<Offer> && sizeof(Offer) == 96);

struct Answer {
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
};
static_assert(std::is_trivially_copyable_v<Answer> && sizeof(Answer) == 8);

inline constexpr same_host::Lane kLane{
    .name = "nvlink",
    .magic = kMagic,
    .version = kVersion,
    .socket = "kvc-gpu-",
    .board = "kvc-nvlink-board",
    .segment = "kvc-nvlink-link",
    .board_bytes = sizeof(Board),
    .segment_bytes = sizeof(Segment),
    .if_other_users = "run both as one user",
};

}  // namespace kvc::nvlink
