// What two nvlink domains share beside what every lane of one machine has (same_host/): the memory both map, and the
// bytes of a handshake.
//
// Board    one per domain, written by that domain only, sealed read-only for everyone else: which regions exist, how
//          to map them, and whether the worker sleeps.
// Segment  one per link: a Channel for each direction.
// Channel  one direction of a link: a ring of immediates, slots of messages, and the account of batches under way.
//
// Memory that no IPC handle names is in pieces, which the link's socket carries as descriptors (kMemory), as soon as the
// two have met and later as regions are registered.
//
// Pages themselves go from GPU to GPU; only counts, messages and this bookkeeping pass through the processors.
//
// The account, which makes fencing sound without the peer's cooperation in the normal case. A batch is: raise `entered`,
// look at `revoked` and at the region's key, hand it to the GPU, raise `left` when the GPU has finished it. The receiver
// revokes first and reads `entered` then, both sequentially consistent: a batch that entered before is waited for until
// `left` has caught up with what was read; one that enters later sees the revocation. A batch's immediate goes into the
// ring before it leaves: what the receiver finds there after the wait is all that will ever be counted. A peer whose
// process is gone has nothing under way: the driver stops a process's GPU work before it lets the process go.
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

constexpr uint32_t kVersion = 2;
constexpr uint32_t kMagic = 0x6B76636E;  // "kvcn": whose bytes these are

// Regions of one domain. An engine has one or a few for its KV caches.
constexpr uint32_t kMaxRegions = 256;

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
  SharedWord memory;        // 0: `allocation` names it. Else it is in pieces, which come over the socket by this name
  SharedWord pieces_bytes;  // all of them
  cuda::IpcHandle allocation;
  uint64_t padding[1];
};
static_assert(sizeof(RegionEntry) == 128);

struct Board {
  // Odd: the worker sleeps (or is about to) and wants a kWake after anything new; a new number each time, so that a
  // sender wakes it once. Sequentially consistent against Channel::tail and messages_put.
  alignas(64) SharedWord sleep;
  uint64_t process = 0;  // random, one per process: which peers share our address space
  alignas(128) RegionEntry regions[kMaxRegions];
};
static_assert(offsetof(Board, sleep) == 0, "where Sleep and Connection look for it");

// The sender's account.
struct AccountWords {
  alignas(64) SharedWord entered;  // batches that may be landing: everything up to `entered` and above `left`
  SharedWord left;
  SharedWord starved;       // 1: the ring is full and the sender sleeps: wake it when there is room
  SharedWord pieces_taken;  // of the receiver's memory, out of the socket so far
};
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
