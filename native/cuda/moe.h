// What the host and the expert kernels (moe_kernels.cuh) agree on. Included by nvcc and by the C++ compiler.
#pragma once

#include <cstdint>

namespace kvc::moe {

// GPUs of one NVLink domain in the machines that we know. A kernel holds a token's vector of every rank in registers.
inline constexpr uint32_t kMaxRanks = 8;
// Activations, scales, ids, weights, and four more.
inline constexpr uint32_t kMaxColumns = 8;
// A warp reads a token's experts at once.
inline constexpr uint32_t kMaxTopK = 32;
// Each flag has a line of its own: a peer's store invalidates no other flag.
inline constexpr uint32_t kFlagBytes = 128;
inline constexpr uint32_t kMaxThreads = 512;

// The halves of an operation. Both in one launch are what a single batch wants.
inline constexpr uint32_t kSend = 1;
inline constexpr uint32_t kReceive = 2;

enum class Fault : uint32_t {
  kNone = 0,
  kDispatchTimeout = 1,  // a rank's rows did not come in time
  kCombineTimeout = 2,   // a rank's results did not come in time
  kLost = 3,             // the host had said that the rank is gone
};

// What the kernels of a slot keep from launch to launch, in local memory. A graph's replays find it here.
struct Control {
  uint32_t epoch;        // of the last dispatch that was sent
  uint32_t faulted;      // not 0: a wait was given up, and no launch does anything any more
  uint32_t blocks_done;  // 0 before and after each launch
  uint32_t padding;
};

// What the host and the kernels tell each other, in pinned memory.
struct HostWords {
  uint32_t lost;  // written by the host: a bit for each rank that ended. A survivor may have given up and raise no flag
                  // any more, so no wait goes on, whoever it is for
  uint32_t left;  // written by the host: a bit for each rank that left in good order. Waits for it alone end
  uint32_t fault;  // written by the first kernel that gave up: a Fault in the upper, the rank in the lower 16 bits
};

// One array that travels with the rows.
struct Column {
  const unsigned char* source;  // [tokens][row_bytes] of this rank
  uint64_t target;              // where this rank's first row lies in every segment, from the segment's begin
  uint32_t row_bytes;
  uint32_t unit;    // 16, 4 or 1: the bytes that one load moves; all addresses and row_bytes are multiples of it
  uint32_t to_all;  // not 0: every rank gets the row, whether it has an expert of the token or not
  uint32_t padding;
};

struct DispatchLaunch {
  unsigned char* segments[kMaxRanks];  // as mapped here
  Column columns[kMaxColumns];
  const void* ids;        // [tokens][top_k], of ids_bytes each; others than 0 to experts-1 are nobody's
  const uint8_t* owners;  // [experts]; null: expert e is of rank e / experts_per_rank
  uint32_t* masks;        // [tokens]: the ranks that a token's row went to, for combine
  Control* control;
  HostWords* host;
  uint64_t arrived;  // where a slot's flags lie in every segment, one for each source
  uint64_t timeout_ns;
  uint32_t ranks;
  uint32_t rank;
  uint32_t tokens;
  uint32_t column_count;
  uint32_t top_k;
  uint32_t ids_bytes;  // 4 or 8
  uint32_t experts;
  uint32_t experts_per_rank;  // 0, and no owners: every row goes to every rank
  uint32_t phases;
  uint32_t padding;
};

struct CombineLaunch {
  unsigned char* segments[kMaxRanks];
  unsigned char* out;     // [tokens][vectors * 8] of bf16
  const uint32_t* masks;  // [tokens], written by the slot's last dispatch
  Control* control;
  HostWords* host;
  uint64_t ready;  // where a slot's flags lie in every segment, one for each rank
  uint64_t rows;   // where the results for this rank's first row lie in every segment
  uint64_t timeout_ns;
  uint32_t ranks;
  uint32_t rank;
  uint32_t tokens;
  uint32_t vectors;  // of 16 bytes a row
  uint32_t parts;    // blocks that share a row
  uint32_t accumulate;
  uint32_t phases;
  uint32_t padding;
};

}  // namespace kvc::moe
