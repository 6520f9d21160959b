// What two nvlink domains share beside what every lane of one machine has (same_host/): the memory both map, and the
// bytes of a handshake.
//
// Board    one per domain, written by that domain only, sealed read-only for everyone else: which regions exist, how
//          to map them, and whether its thread sleeps. A region is spoken of by its place there.
// Segment  one per link: a Channel for each direction.
// Channel  one direction of a link: a ring of immediates, slots of messages, and the account of batches under way.
//
// Memory that no IPC handle names is in pieces, which the link's socket carries as descriptors (kMemory), as soon as the
// two have met and later as regions are registered. Of a region that is revoked each peer is told (kForget): it lets its
// copies end, unmaps, and says so in `let_go`. Until then the region's memory may not be freed, nor its place be used
// again. Nobody maps anything of a domain that does not have the link yet (Admission::kPending), and so could not tell it.
//
// Pages themselves go from GPU to GPU; only counts, messages and this bookkeeping pass through the processors.
//
// The account, which makes fencing sound without the peer's cooperation in the normal case. A batch is: raise `entered`,
// look at `admission` and at the region's key, hand it to the GPU, put the immediate into the ring when the GPU has
// finished, raise `left`. The receiver revokes first and reads `entered` then, both sequentially consistent: a batch that
// entered before is waited for until `left` has caught up with what was read; one that enters later sees the revocation.
// What the receiver finds in the ring after the wait is all that will ever be counted. A peer whose process is gone has
// nothing under way: the driver stops a process's GPU work before it lets the process go.
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
constexpr uint32_t kMagic = 0x6B76636E;  // "kvcn": whose bytes these are

// Regions of one domain: a few for KV caches, and a model's weights, each tensor apart, are thousands. A board is 2 MiB, of
// which only what was used once has memory behind it: whoever reads more makes the kernel allocate the rest.
constexpr uint32_t kMaxRegions = 16384;
// Where the region of a key is on its owner's board.
constexpr uint32_t place_of(uint64_t rkey) noexcept { return static_cast<uint32_t>(rkey % kMaxRegions); }

// The pieces of a region's memory (cuda/virtual_memory.h) that a peer has been sent and has not taken yet. Enough that
// both sides are at work at a time, and few enough that peers which hang do not use up the descriptors that a user may
// have under way (RLIMIT_NOFILE, often 1024, over all sockets).
constexpr uint32_t kUntakenPieces = 16;

struct RegionEntry {
  SharedWord rkey;  // 0: no region. Written last; stays 0 until no sender can be using the entry any more.
  SharedWord base;  // the first address, in the address space of the domain's process
  SharedWord length;
  SharedWord offset;        // of `base` in its allocation, or in the first of its pieces
  SharedWord device;        // the GPU's ordinal in that process: for a peer in the same process
  SharedWord pieces_bytes;  // 0: `allocation` names it. Else it is in pieces of so many bytes in all
  cuda::IpcHandle allocation;
  uint64_t padding[2];
};
static_assert(sizeof(RegionEntry) == 128);

struct Board {
  // Odd: the domain's thread sleeps (or is about to) and wants a kWake after anything new; a new number each time, so that
  // a sender wakes it once. Sequentially consistent against Channel::tail and messages_put.
  alignas(64) SharedWord sleep;
  uint64_t process = 0;  // random, one per process: which peers share our address space
  SharedWord places;     // those of `regions` from here on were never used
  alignas(128) RegionEntry regions[kMaxRegions];

  // Null: there is no region of this key. The entry may change its mind at any time.
  const RegionEntry* find(uint64_t rkey) const noexcept {
    const uint32_t place = place_of(rkey);
    if (rkey == 0 || place >= places.load(std::memory_order_acquire)) return nullptr;
    return regions[place].rkey.load(std::memory_order_seq_cst) == rkey ? &regions[place] : nullptr;
  }
};
static_assert(offsetof(Board, sleep) == 0, "where Sleep and Connection look for it");

// The sender's account.
struct AccountWords {
  alignas(64) SharedWord entered;  // batches that may be landing: everything up to `entered` and above `left`
  SharedWord left;
  SharedWord starved;       // 1: the ring is full and the sender sleeps: wake it when there is room
  SharedWord pieces_taken;  // of the receiver's memory, out of the socket and mapped so far
  SharedWord let_go;        // the receiver's kForgets that are done: what they named is not mapped here any more
};
// AccountWords::let_go once the link has ended here: nothing of the receiver's memory is mapped any more.
constexpr uint64_t kAllLetGo = UINT64_MAX;

struct Channel : same_host::ReceiverWords, AccountWords, same_host::SenderWords {};
static_assert(sizeof(Channel) == sizeof(same_host::ReceiverWords) + 64 + sizeof(same_host::SenderWords));

struct Segment {
  Channel to_offerer;
  Channel to_acceptor;
};

struct Offer : same_host::Invitation {
  uint64_t process = 0;  // the offerer's Board::process
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
