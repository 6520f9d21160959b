// The state that two host domains share beside same_host/: the memory that both map, and the bytes of a handshake.
//
// Board    one per domain, written by that domain only, sealed read-only for all other processes: which regions exist,
//          and whether its thread sleeps. One board serves all peers, so a registration is one store.
// Segment  one per link: a Channel for each direction.
// Channel  one direction of a link: a ring of immediates, slots of messages, and the gate through which every write
//          passes.
//
// The gate. A sender writes in these steps:
// - enter (gate odd)
// - look at `admission` and at the region's key
// - write at most kChunkBytes
// - put the immediate into the ring, if that was the last chunk
// - leave (gate even)
// The receiver first revokes and then looks at the gate, both sequentially consistent. If it sees the gate even or
// changed, every later entry sees the revocation. If it sees the gate odd, it looks again. So fencing never waits for a
// peer's cooperation, only for the end of one chunk. After it, the ring holds all that will ever be counted over this
// link. The receiver admits no write over a link before its domain has the link, and with it the gate to look at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "providers/same_host/channel.h"
#include "providers/same_host/lane.h"
#include "providers/same_host/wire.h"

namespace kvc::host {

using same_host::SharedWord;

constexpr uint32_t kVersion = 4;
constexpr uint32_t kMagic = 0x6B766368;  // "kvch": marks the bytes of this lane

// The most regions of one domain. A model of 200 layers with separate K and V and a few auxiliary tensors registers
// 500. Its weights, with each tensor a region, are some thousands. The board is 1 MiB, and only entries that were used
// once have memory behind them. A peer that reads other entries than those of its keys makes the kernel allocate the
// rest.
constexpr uint32_t kMaxRegions = 16384;
// Returns the place of a key's region on its owner's board.
constexpr uint32_t place_of(uint64_t rkey) noexcept { return static_cast<uint32_t>(rkey % kMaxRegions); }

struct RegionEntry {
  SharedWord rkey;  // 0: no region. Written last; stays 0 until no sender can be using the entry any more.
  SharedWord base;  // the first address, in the domain's process
  SharedWord length;
  SharedWord memory;  // the memfd behind it (Message::memory); 0: private memory of the domain's process
  SharedWord memory_offset;
  uint64_t padding[3];
};
static_assert(sizeof(RegionEntry) == 64);

struct Board {
  // Odd: the domain's thread sleeps (or is about to) and wants kWake after anything new. Each sleep has a new number,
  // so that a sender wakes it once. Sequentially consistent with Channel::tail.
  alignas(64) SharedWord sleep;
  alignas(64) RegionEntry regions[kMaxRegions];
};
static_assert(offsetof(Board, sleep) == 0, "where Sleep and Connection look for it");

// The sender's passage. It changes with each chunk, so it has its own cache line.
struct GateWords {
  alignas(64) SharedWord gate;  // odd: the sender is inside
  SharedWord starved;           // 1: the ring is full and the sender sleeps; wake it when there is room
};
struct Channel : same_host::ReceiverWords, GateWords, same_host::SenderWords {};
static_assert(sizeof(Channel) == sizeof(same_host::ReceiverWords) + 64 + sizeof(same_host::SenderWords));

struct Segment {
  Channel to_offerer;
  Channel to_acceptor;
};

// A word in private memory. The peer reads it (is this the right process?) and writes it back unchanged (is writing
// permitted?).
struct Probe {
  uint64_t address = 0;
  uint64_t value = 0;          // random, never 0
  uint64_t pid_namespace = 0;  // of the process; 0: unknown
  uint64_t user_namespace = 0;
  uint64_t mount_namespace = 0;  // differs between containers, even if they share their other namespaces
  uint32_t private_regions = 0;  // 1: only process_vm_writev can reach some of the regions
  uint32_t padding = 0;
};

struct Offer : same_host::Invitation {
  Probe probe;
};
static_assert(std::is_trivially_copyable_v<Offer> && sizeof(Offer) == 136);

struct Answer {
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  Probe probe;
};
static_assert(std::is_trivially_copyable_v<Answer> && sizeof(Answer) == 56);

inline constexpr same_host::Lane kLane{
    .name = "host",
    .magic = kMagic,
    .version = kVersion,
    .socket = "kvc-host-",
    .board = "kvc-board",
    .segment = "kvc-link",
    .board_bytes = sizeof(Board),
    .segment_bytes = sizeof(Segment),
    .if_other_users = "run both as one user, or configure providers=[\"tcp\"]",
};

}  // namespace kvc::host
