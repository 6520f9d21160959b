// Dispatch and combine of a mixture-of-experts layer over GPUs that map each other's memory. Part of kernels.cu.
//
// Memory order, in the terms of the PTX memory model. Dispatch: each block's stores are followed by __syncthreads and
// by an atomic of its first thread, with acquire and release at GPU scope. The last block's atomic reads what all
// blocks released. Each of its threads that sets a flag first fences at system scope, all in one instruction. Combine:
// the previous launch wrote the results, and the same fence precedes the flags. Waiting threads poll with acquire
// loads.
#pragma once

#include "cuda/moe_launch.h"

namespace kvc::moe {
namespace {

// Programmatic dependent launch: this grid may begin while the previous grid still runs. Memory that an earlier kernel
// reads or writes must not be touched before this call.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Allows the next grid to begin. It still waits for the end of this grid before it touches memory.
__device__ __forceinline__ void let_successor_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* word) {
  uint32_t value = 0;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
  uint32_t value = 0;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// __threadfence_system() is sequentially consistent, which costs more and is not needed.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ void store_relaxed(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* word, uint32_t value) {
  uint32_t before = 0;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}
__device__ __forceinline__ uint64_t now_ns() {
  uint64_t now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ uint32_t* flag_of(unsigned char* segment, uint64_t flags, uint32_t rank) {
  return reinterpret_cast<uint32_t*>(segment + flags + rank * kFlagBytes);
}

// Shows the other ranks that this rank waits, so that they do not count its time. The value differs from the one before.
template <typename Launch>
__device__ __noinline__ void show_waiting(const Launch& launch, uint64_t now) {
  for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
    if (rank == launch.rank) continue;
    store_relaxed(flag_of(launch.segments[rank], launch.waiting, launch.rank), static_cast<uint32_t>(now >> 10));
  }
}
// The part of the time since `last` that counts. A longer pause is one of this GPU.
template <typename Launch>
__device__ __forceinline__ uint64_t passed(const Launch& launch, uint64_t last, uint64_t now) {
  const uint64_t pause = launch.timeout_ns / kPauses + 1;
  return now - last < pause ? now - last : pause;
}

// Records the first fault. Later callers find `faulted` set, or the other slot's fault in the host's word.
__device__ __noinline__ void record_fault(Control* control, HostWords* host, Fault fault, uint32_t rank) {
  if (atomicCAS(&control->faulted, 0U, 1U) != 0 || load_relaxed(&host->fault) != 0) return;
  store_relaxed(&host->fault, static_cast<uint32_t>(fault) << 16 | rank);
}

// Returns whether a wait for `rank` is over, and records the fault then. A rank that ended comes before a rank that
// left: others leave because of its end.
__device__ __noinline__ bool gives_up(Control* control, HostWords* host, uint32_t rank, Fault timeout, bool late) {
  uint32_t gone = load_relaxed(&host->lost);
  if (gone == 0) gone = load_relaxed(&host->left) & 1U << rank;
  const bool other = load_relaxed(&host->fault) != 0;
  if (gone == 0 && !other && !late) return false;
  record_fault(control, host, gone != 0 ? Fault::kLost : timeout, gone != 0 ? __ffs(static_cast<int>(gone)) - 1 : rank);
  return true;
}

// The following functions are for groups that survive (`launch.survive`).

// Returns whether another rank goes on without this rank, and records the fault then. `flags`: in the own segment.
__device__ __noinline__ bool is_evicted(unsigned char* segment, uint64_t flags, uint32_t ranks, Control* control,
                                        HostWords* host) {
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    if (load_acquire(flag_of(segment, flags, rank)) == 0) continue;
    record_fault(control, host, Fault::kEvicted, rank);
    return true;
  }
  return false;
}

// Goes on without the rank in this launch and in all later launches of the slot. Its own launches end. `evicted`: the
// flag of this rank in that rank's segment.
__device__ __noinline__ void mask_rank(uint32_t rank, uint32_t* evicted, Control* control, HostWords* host) {
  store_relaxed(evicted, 1);
  fence_system();  // before the experts overwrite results that the rank may still read
  atomicOr(&control->masked, 1U << rank);
  store_relaxed(&host->masked[rank], 1);
}

enum class Wait : uint32_t { kArrived, kMasked, kFaulted };

// Waits until the flag reaches the epoch. The host's words lie across PCIe, and reading the timer takes time. Both are
// read at every 1,024th poll only, about once a millisecond. The time of a rank counts while it does not wait itself.
template <typename Launch>
__device__ __forceinline__ Wait wait_for_flag(const Launch& launch, uint64_t flags, uint32_t epoch, uint32_t rank,
                                              Fault timeout) {
  unsigned char* segment = launch.segments[launch.rank];
  const uint32_t* flag = flag_of(segment, flags, rank);
  uint32_t polls = 0;
  uint32_t seen = 0;
  uint64_t last = 0;
  uint64_t waited = 0;
  uint64_t counted = 0;
  while (static_cast<int32_t>(load_acquire(flag) - epoch) < 0) {
    if ((++polls & 1023U) != 0) continue;
    const uint64_t now = now_ns();
    const uint64_t more = last == 0 ? 0 : passed(launch, last, now);
    const uint32_t shown = load_relaxed(flag_of(segment, launch.waiting, rank));
    last = now;
    waited += more;
    counted = shown == seen ? counted + more : 0;
    seen = shown;
    show_waiting(launch, now);
    const bool late = counted > launch.timeout_ns || waited > launch.ranks * launch.timeout_ns;
    if (launch.survive != 0) {
      if (is_evicted(segment, launch.evicted, launch.ranks, launch.control, launch.host)) return Wait::kFaulted;
      const bool gone =
          (load_relaxed(&launch.host->dead) >> rank & 1U) != 0 || load_relaxed(&launch.host->masked[rank]) != 0;
      if (load_relaxed(&launch.host->lost) == 0 && (late || gone)) {
        mask_rank(rank, flag_of(launch.segments[rank], launch.evicted, launch.rank), launch.control, launch.host);
        return Wait::kMasked;
      }
    }
    if (gives_up(launch.control, launch.host, rank, timeout, late)) return Wait::kFaulted;
  }
  return Wait::kArrived;
}

// Stores of a rank that is gone may still land where this step has other rows. So the step begins after the end of its
// process. Returns the ranks that this step goes on without, or all bits if it gave up waiting. For one thread of each
// block.
__device__ __noinline__ uint32_t wait_for_fences(const DispatchLaunch& launch) {
  Control* control = launch.control;
  HostWords* host = launch.host;
  if (is_evicted(launch.segments[launch.rank], launch.evicted, launch.ranks, control, host)) return ~0U;
  uint32_t masked = load_relaxed(&control->masked);
  const uint32_t dead = load_relaxed(&host->dead);
  for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
    if ((masked >> rank & 1U) != 0) continue;
    if ((dead >> rank & 1U) == 0 && load_relaxed(&host->masked[rank]) == 0) continue;
    mask_rank(rank, flag_of(launch.segments[rank], launch.evicted, launch.rank), control, host);
    masked |= 1U << rank;
  }
  uint64_t last = now_ns();
  uint64_t waited = 0;
  uint64_t next = 0;
  for (;;) {
    const uint32_t living = masked & ~load_relaxed(&host->fenced);
    if (living == 0) return masked;
    if (is_evicted(launch.segments[launch.rank], launch.evicted, launch.ranks, control, host)) return ~0U;
    const uint64_t now = now_ns();
    waited += passed(launch, last, now);
    last = now;
    if (now >= next) {
      next = now + kWaitingNs;
      show_waiting(launch, now);
    }
    const uint32_t rank = __ffs(static_cast<int>(living)) - 1;
    if (gives_up(control, host, rank, Fault::kDispatchTimeout, waited > launch.timeout_ns)) return ~0U;
    __nanosleep(1000);
  }
}

// The rows of masked ranks have old bytes. Without ids they belong to no expert. For a whole block.
__device__ __noinline__ void blank_masked(const DispatchLaunch& launch, uint32_t masked) {
  uint64_t own = 0;  // rows before the own ones
  for (uint32_t rank = 0; rank < launch.rank; ++rank) own += launch.sizes[rank];
  for (uint32_t i = 0; i < launch.column_count; ++i) {
    const Column& column = launch.columns[i];
    if (column.blank == 0) continue;
    unsigned char* rows = launch.segments[launch.rank] + column.target - own * column.row_bytes;
    for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
      const uint64_t bytes = static_cast<uint64_t>(launch.sizes[rank]) * column.row_bytes;
      for (uint64_t k = threadIdx.x; (masked >> rank & 1U) != 0 && k < bytes; k += blockDim.x) rows[k] = 0xFF;
      rows += bytes;
    }
  }
}

// The ranks that own an expert of the token, equal in every lane. Whole warps must call it.
__device__ __forceinline__ uint32_t ranks_of(const DispatchLaunch& launch, uint32_t token) {
  if (launch.experts_per_rank == 0 && launch.owners == nullptr) return (1U << launch.ranks) - 1;
  const uint32_t lane = threadIdx.x % 32;
  uint32_t mask = 0;
  if (lane < launch.top_k) {
    const uint64_t index = static_cast<uint64_t>(token) * launch.top_k + lane;
    const int64_t id = launch.ids_bytes == 8 ? static_cast<const int64_t*>(launch.ids)[index]
                                             : static_cast<const int32_t*>(launch.ids)[index];
    if (id >= 0 && id < launch.experts) {
      const uint32_t expert = static_cast<uint32_t>(id);
      mask = 1U << (launch.owners != nullptr ? launch.owners[expert] : expert / launch.experts_per_rank);
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) mask |= __shfl_xor_sync(0xffffffffU, mask, distance);
  return mask;
}

template <typename Unit>
__device__ __forceinline__ void store_unit(const DispatchLaunch& launch, uint32_t mask, uint64_t offset, Unit value) {
  for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
    if ((mask >> rank & 1U) != 0) *reinterpret_cast<Unit*>(launch.segments[rank] + offset) = value;
  }
}

// Copies one row of a column with all threads, or with one warp.
template <typename Unit>
__device__ __forceinline__ void copy_row(const DispatchLaunch& launch, const Column& column, uint32_t token,
                                         uint32_t mask, uint32_t first, uint32_t step) {
  const uint64_t row = static_cast<uint64_t>(token) * column.row_bytes;
  const auto* source = reinterpret_cast<const Unit*>(column.source + row);
  for (uint32_t i = first; i < column.row_bytes / sizeof(Unit); i += step) {
    store_unit(launch, mask, column.target + row + i * sizeof(Unit), source[i]);
  }
}
__device__ __forceinline__ void copy_row(const DispatchLaunch& launch, const Column& column, uint32_t token,
                                         uint32_t mask, uint32_t first, uint32_t step) {
  if (column.unit == 16) return copy_row<uint4>(launch, column, token, mask, first, step);
  if (column.unit == 4) return copy_row<uint32_t>(launch, column, token, mask, first, step);
  copy_row<unsigned char>(launch, column, token, mask, first, step);
}

// `all`: every rank, or 0 after a fault, so that nothing is stored any more. It is needed last, because its load takes
// time.
__device__ __forceinline__ void send_token(const DispatchLaunch& launch, uint32_t token, uint32_t all) {
  // The widest column comes first. Up to two vectors per thread are loaded before the ids are known.
  const Column& wide = launch.columns[0];
  const uint64_t row = static_cast<uint64_t>(token) * wide.row_bytes;
  const uint32_t vectors = wide.unit == 16 ? wide.row_bytes / 16 : 0;
  const auto* source = reinterpret_cast<const uint4*>(wide.source + row);
  const uint32_t second = threadIdx.x + blockDim.x;
  uint4 a{};
  uint4 b{};
  if (threadIdx.x < vectors) a = source[threadIdx.x];
  if (second < vectors) b = source[second];
  const uint32_t mask = ranks_of(launch, token) & all;
  if (threadIdx.x == 0) launch.masks[token] = mask;
  const uint32_t wanted = wide.to_all != 0 ? all : mask;
  if (threadIdx.x < vectors) store_unit(launch, wanted, wide.target + row + threadIdx.x * 16U, a);
  if (second < vectors) store_unit(launch, wanted, wide.target + row + second * 16U, b);
  for (uint32_t i = second + blockDim.x; i < vectors; i += blockDim.x) {
    store_unit(launch, wanted, wide.target + row + i * 16U, source[i]);
  }
  if (vectors == 0) copy_row(launch, wide, token, wanted, threadIdx.x, blockDim.x);
  // The other columns are short: one warp each.
  const uint32_t warps = blockDim.x / 32;
  for (uint32_t i = 1 + threadIdx.x / 32; i < launch.column_count; i += warps) {
    const Column& column = launch.columns[i];
    copy_row(launch, column, token, column.to_all != 0 ? all : mask, threadIdx.x % 32, 32);
  }
}

// Waits for the flags of all sources, with one thread per flag. Whole blocks must call it. `masked`: ranks that this
// launch goes on without.
__device__ __forceinline__ void receive_rows(const DispatchLaunch& launch, uint32_t epoch, uint32_t masked) {
  __shared__ uint32_t gone;
  if (launch.survive != 0) {
    if (threadIdx.x == 0) gone = masked;
    __syncthreads();
  }
  if (threadIdx.x < launch.ranks && (masked >> threadIdx.x & 1U) == 0 &&
      wait_for_flag(launch, launch.arrived, epoch, threadIdx.x, Fault::kDispatchTimeout) == Wait::kMasked) {
    atomicOr(&gone, 1U << threadIdx.x);
  }
  if (launch.survive == 0) return;
  __syncthreads();
  if (gone != 0) blank_masked(launch, gone);
}

struct Sums {
  float values[8];
};

__device__ __forceinline__ void add(Sums& sums, const uint4& vector) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sums.values[2 * i] += __uint_as_float(words[i] << 16);
    sums.values[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000U);
  }
}

// Rounds to nearest, ties to even. A NaN stays a NaN.
__device__ __forceinline__ uint32_t to_bf16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return 0x7fffU;
  return (bits + 0x7fffU + (bits >> 16 & 1U)) >> 16;
}
__device__ __forceinline__ uint4 rounded(const Sums& sums) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = to_bf16(sums.values[2 * i]) | to_bf16(sums.values[2 * i + 1]) << 16;
  return {words[0], words[1], words[2], words[3]};
}

// Sums kVectors vectors of a row per thread. The vectors of every rank are loaded before the first is added. `mask`:
// the ranks that received the token's row.
template <int kVectors, uint32_t kRanks>
__device__ __forceinline__ void combine_part(const CombineLaunch& launch, uint32_t token, uint32_t first,
                                             uint32_t mask) {
  const uint64_t row = static_cast<uint64_t>(token) * launch.vectors;
  uint4 loaded[kVectors][kRanks];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t index = first + v * blockDim.x;
#pragma unroll
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      loaded[v][rank] = {};
      if ((mask >> rank & 1U) != 0 && index < launch.vectors) {
        loaded[v][rank] = reinterpret_cast<const uint4*>(launch.segments[rank] + launch.rows)[row + index];
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t index = first + v * blockDim.x;
    if (index >= launch.vectors) continue;
    Sums sums{};
#pragma unroll
    for (uint32_t rank = 0; rank < kRanks; ++rank) add(sums, loaded[v][rank]);
    uint4* out = reinterpret_cast<uint4*>(launch.out) + row + index;
    if (launch.accumulate != 0) add(sums, *out);
    *out = rounded(sums);
  }
}

// Combine for up to kRanks ranks.
template <int kVectors, uint32_t kRanks>
__device__ __forceinline__ void combine(const CombineLaunch& launch) {
  wait_for_predecessor();
  __shared__ uint32_t epoch;
  __shared__ bool faulted;
  __shared__ uint32_t gone;  // ranks that this block goes on without
  const uint32_t units = launch.tokens * launch.parts;
  // Loaded before the wait: it is local, and takes as long as the flight of a flag.
  uint32_t mask = blockIdx.x < units ? launch.masks[blockIdx.x / launch.parts] : 0;
  // A second warp loads what the flags need while the first one fences.
  const bool raises = blockIdx.x == 0 && (launch.phases & kSend) != 0 && threadIdx.x < launch.ranks;
  if (raises) fence_system();
  if (threadIdx.x == 32) {
    epoch = launch.control->epoch;
    faulted = launch.control->faulted != 0;
    gone = launch.survive != 0 ? launch.control->masked : 0;
    if (launch.survive != 0 &&
        is_evicted(launch.segments[launch.rank], launch.evicted, launch.ranks, launch.control, launch.host)) {
      faulted = true;
    }
  }
  __syncthreads();
  if (faulted) return;
  const bool waits = threadIdx.x < launch.ranks && (gone >> threadIdx.x & 1U) == 0;
  if (raises && waits) store_relaxed(flag_of(launch.segments[threadIdx.x], launch.ready, launch.rank), epoch);
  if ((launch.phases & kReceive) == 0) return;
  if (launch.survive != 0) __syncthreads();  // all threads have read `gone`
  if (waits) {
    const Wait found = wait_for_flag(launch, launch.ready, epoch, threadIdx.x, Fault::kCombineTimeout);
    if (found == Wait::kFaulted) faulted = true;
    if (found == Wait::kMasked) atomicOr(&gone, 1U << threadIdx.x);
  }
  __syncthreads();
  if (faulted) return;
  let_successor_begin();
  const uint32_t present = ~gone;
  for (uint32_t unit = blockIdx.x; unit < units;) {
    const uint32_t token = unit / launch.parts;
    const uint32_t first = unit % launch.parts * kVectors * blockDim.x + threadIdx.x;
    unit += gridDim.x;
    const uint32_t next = unit < units ? launch.masks[unit / launch.parts] : 0;
    combine_part<kVectors, kRanks>(launch, token, first, mask & present);
    mask = next;
  }
  if (launch.survive == 0) return;
  // A rank that goes on without this rank may have overwritten its results meanwhile. It has set the flag before.
  __syncthreads();
  if (threadIdx.x != 0) return;
  fence_system();
  is_evicted(launch.segments[launch.rank], launch.evicted, launch.ranks, launch.control, launch.host);
}

}  // namespace

// One block per token, or several tokens in sequence. At least one block, because the flags are set for 0 tokens, too.
extern "C" __global__ void __launch_bounds__(kMaxThreads)
    kvc_moe_dispatch(const __grid_constant__ DispatchLaunch launch) {
  wait_for_predecessor();
  __shared__ bool last;
  __shared__ uint32_t gone;  // ranks that this launch goes on without; all bits: it does nothing
  Control* control = launch.control;
  bool faulted = control->faulted != 0;
  const uint32_t before = control->epoch;
  uint32_t masked = 0;
  if ((launch.phases & kSend) == 0) {
    if (launch.survive != 0) {
      masked = control->masked;
      if (threadIdx.x == 0) {
        last = is_evicted(launch.segments[launch.rank], launch.evicted, launch.ranks, control, launch.host);
      }
      __syncthreads();
      faulted = faulted || last;
    }
    if (!faulted && blockIdx.x == 0) receive_rows(launch, before, masked);
    return;
  }
  if (launch.survive != 0) {
    if (threadIdx.x == 0) gone = faulted ? ~0U : wait_for_fences(launch);
    __syncthreads();
    masked = gone;
    faulted = gone == ~0U;
  }
  const uint32_t all = faulted ? 0 : ((1U << launch.ranks) - 1) & ~masked;
  for (uint32_t token = blockIdx.x; token < launch.tokens; token += gridDim.x) send_token(launch, token, all);
  let_successor_begin();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = add_acquire_release(&control->blocks_done, 1U) + 1 == gridDim.x;
    if (last) {
      control->blocks_done = 0;
      control->epoch = before + 1;
    }
  }
  __syncthreads();
  // Another block may have given up, and sent nothing.
  if (!last || faulted || (launch.survive != 0 && load_relaxed(&control->faulted) != 0)) return;
  const uint32_t epoch = before + 1;
  if (threadIdx.x < launch.ranks && (masked >> threadIdx.x & 1U) == 0) {
    fence_system();
    store_relaxed(flag_of(launch.segments[threadIdx.x], launch.arrived, launch.rank), epoch);
  }
  if ((launch.phases & kReceive) != 0) receive_rows(launch, epoch, masked);
}

// Combine for up to R ranks, with V vectors of a row per thread.
#define KVC_MOE_COMBINE(V, R)                                                     \
  extern "C" __global__ void __launch_bounds__(kMaxThreads)                       \
      kvc_moe_combine_v##V##_r##R(const __grid_constant__ CombineLaunch launch) { \
    combine<V, R>(launch);                                                        \
  }
KVC_MOE_COMBINE(1, 2)
KVC_MOE_COMBINE(1, 4)
KVC_MOE_COMBINE(1, 8)
KVC_MOE_COMBINE(2, 2)
KVC_MOE_COMBINE(2, 4)
KVC_MOE_COMBINE(2, 8)
#undef KVC_MOE_COMBINE

}  // namespace kvc::moe
