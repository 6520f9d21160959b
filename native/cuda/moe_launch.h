// Constants and structures that the host and the expert kernels (moe_kernels.cuh) share. Included by nvcc and by the
// C++ compiler.
#pragma once

#include <cstdint>

namespace kvc::moe {

// Number of GPUs in one NVLink domain of known machines. A kernel holds a token's vector of every rank in registers.
inline constexpr uint32_t kMaxRanks = 8;
// Activations, scales, ids, weights, and four more.
inline constexpr uint32_t kMaxColumns = 8;
// A warp reads all experts of a token at once.
inline constexpr uint32_t kMaxTopK = 32;
// Each flag has its own line, so that a peer's store does not invalidate other flags.
inline constexpr uint32_t kFlagBytes = 128;
inline constexpr uint32_t kMaxThreads = 512;

// A waiting rank changes its flags at about this interval.
inline constexpr uint64_t kWaitingNs = 1'000'000;
// A longer pause between two polls counts as this part of the timeout: the waiting rank itself did not run.
inline constexpr uint64_t kPauses = 8;

// The halves of an operation. A single batch uses both in one launch.
inline constexpr uint32_t kSend = 1;
inline constexpr uint32_t kReceive = 2;

enum class Fault : uint32_t {
  kNone = 0,
  kDispatchTimeout = 1,  // the rows of a rank did not arrive in time
  kCombineTimeout = 2,   // the results of a rank did not arrive in time
  kLost = 3,             // the host had reported that the rank is gone
  kEvicted = 4,          // the rank goes on without this rank
};

// State of a slot that kernels keep between launches, in local memory. Replays of a graph find it here.
struct Control {
  uint32_t epoch;        // epoch of the last dispatch that was sent
  uint32_t faulted;      // not 0: a wait was given up, and launches do nothing any more
  uint32_t blocks_done;  // 0 before and after each launch
  uint32_t masked;       // one bit for each rank that launches go on without; only an admission clears it
};

// Words that the host and the kernels exchange, in pinned memory.
struct HostWords {
  // Written by the host: the bit of the first rank that ended. A surviving rank may have given up and set no more flags,
  // so all waits end, whichever rank they wait for.
  uint32_t lost;
  // Written by the host: one bit for each rank that left in good order. Only waits for that rank end.
  uint32_t left;
  // Written by the first kernel that gave up: a Fault in the upper 16 bits, the rank in the lower 16 bits.
  uint32_t fault;
  // The other words are used by groups that survive.
  uint32_t dead;               // written by the host: bits of ranks that launches no longer wait for
  uint32_t fenced;             // written by the host: bits of ranks whose stores cannot land any more
  uint32_t masked[kMaxRanks];  // written by kernels: not 0 if a launch went on without the rank
};

// An array that is sent with the rows.
struct Column {
  const unsigned char* source;  // [tokens][row_bytes] of this rank
  uint64_t target;              // offset of this rank's first row in every segment
  uint32_t row_bytes;
  uint32_t unit;    // 16, 4 or 1: bytes that one load moves; all addresses and row_bytes are multiples of it
  uint32_t to_all;  // not 0: every rank gets the row, whether or not it has an expert of the token
  uint32_t blank;   // not 0: the rows of a masked rank are filled with ones, which is the id -1
};

struct DispatchLaunch {
  unsigned char* segments[kMaxRanks];  // as mapped in this process
  Column columns[kMaxColumns];
  const void* ids;        // [tokens][top_k], of ids_bytes each; ids outside 0 to experts-1 belong to no rank
  const uint8_t* owners;  // [experts]; null: expert e belongs to rank e / experts_per_rank
  uint32_t* masks;        // [tokens]: ranks that received the token's row, for combine
  Control* control;
  HostWords* host;
  uint64_t arrived;  // offset of the slot's flags in every segment, one flag for each source
  uint64_t evicted;  // offset in every segment, one flag for each rank that goes on without the segment's owner
  uint64_t waiting;  // offset of the slot's flags in every segment, which change as long as the rank waits
  uint64_t timeout_ns;
  uint32_t ranks;
  uint32_t rank;
  uint32_t tokens;
  uint32_t column_count;
  uint32_t top_k;
  uint32_t ids_bytes;  // 4 or 8
  uint32_t experts;
  uint32_t experts_per_rank;  // 0 without owners: every row goes to every rank
  uint32_t phases;
  uint32_t survive;           // not 0: goes on without ranks that are gone
  uint32_t sizes[kMaxRanks];  // tokens of each rank
};

struct CombineLaunch {
  unsigned char* segments[kMaxRanks];
  unsigned char* out;     // [tokens][vectors * 8] of bf16
  const uint32_t* masks;  // [tokens], written by the slot's last dispatch
  Control* control;
  HostWords* host;
  uint64_t ready;  // offset of the slot's flags in every segment, one flag for each rank
  uint64_t evicted;
  uint64_t waiting;
  uint64_t rows;  // offset of the results for this rank's first row in every segment
  uint64_t timeout_ns;
  uint32_t ranks;
  uint32_t rank;
  uint32_t tokens;
  uint32_t vectors;  // number of 16-byte vectors in a row
  uint32_t parts;    // number of blocks that share a row
  uint32_t accumulate;
  uint32_t phases;
  uint32_t survive;  // `parts` is 1: one block decides whether a rank's result is in a row
};

}  // namespace kvc::moe
