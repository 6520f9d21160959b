// Copier: copies of scattered pages by one domain's GPU, on low-priority streams. Launches of few pages use the GPU's
// copy engines, which neither wait for an SM nor take one from compute kernels. Larger launches use one kernel.
//
// Launches alternate between several streams, so that one launch fills the link while another begins or ends. They are
// reported as finished in the order in which they began. Opening and the destructor may block. In between, one thread
// uses the Copier. It blocks only if the driver refuses both ways of copying, until the copies that had begun have
// ended.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/error.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"

namespace kvc::cuda {

// The most that one launch carries. 32 MiB take 90 us at 350 GB/s, so its completions do not wait long.
inline constexpr uint64_t kLaunchBytes = 32 << 20;
inline constexpr uint32_t kLaunchPages = 4096;
// Launches of up to this many pages use the copy engines, at 1.3 us per page. Measured on two H200s with pages of 64
// KiB, by kernel and by copy engines. One page: 12 and 9 us on an idle GPU, 35 to 256 and 9 to 17 us beside kernels
// that fill it. 16 pages: 16 and 28 us, 40 to 256 and 28 to 36 us. Beside kernels, which produce the pages, up to 16
// pages are therefore not later. Copy engines cost those kernels under 1 % of their time, instead of 1 to 8 %.
inline constexpr uint32_t kEnginePages = 16;
// A stream stands still for about 15 us between a launch's last block and the next launch's first bytes. Measured
// between two H200s, 1 GiB of 64 KiB pages on 16 SMs: one stream 321 GB/s, two streams 348 GB/s. Four streams with
// launches of 4 MiB, which free the SMs for the prefill sooner, reached 308 GB/s and did not make the prefill faster.
inline constexpr uint32_t kStreams = 2;
// Launches in flight at a time: enough that the GPU does not wait for the transfer thread.
inline constexpr uint32_t kLaunches = 8;
static_assert(kLaunches % kStreams == 0, "a list's place also says its stream");

class Copier {
 public:
  // Opens a copier on the device of `context`. It uses at most `blocks` blocks at a time (at least one per stream),
  // each on its own SM. Blocks.
  static Result<std::unique_ptr<Copier>> open(std::shared_ptr<Context> context, uint32_t blocks);
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;
  // Waits for all launches.
  ~Copier();

  const Context& context() const noexcept { return *context_; }

  // --- One launch: begin(), then add() while there is room, then launch().
  bool can_begin() const noexcept { return launched_ - finished_seen_ < kLaunches; }
  void begin(uint64_t page_bytes) noexcept;
  // Whether `pages` more pages of begin()'s length fit. An empty launch has room for any batch.
  bool has_room(uint32_t pages) const noexcept {
    return pages_ == 0 || (pages_ + pages <= kLaunchPages && (pages_ + pages) * page_bytes_ <= kLaunchBytes);
  }
  void add(uint64_t source, uint64_t target) noexcept;
  // Gives the launch to the GPU; launched() is then its number. Without added pages, it does nothing and uses no
  // number.
  Status launch();

  uint64_t launched() const noexcept { return launched_; }
  // The last launch number up to which all launches have ended: their bytes are in place, and their sources may be
  // overwritten.
  uint64_t finished() noexcept;
  bool idle() noexcept { return finished() == launched_; }
  // The GPU's state. An error is final: no work of this process runs there any more.
  Status health() const;
  // Blocks until all launches have ended, or until no work runs on the GPU any more. Any thread, when nothing is
  // launched any more.
  void wait() const;

 private:
  Copier(std::shared_ptr<Context> context, uint32_t blocks) : context_(std::move(context)), blocks_(blocks) {}
  // The list of pages of the launch that is being filled.
  PageCopy* list() const noexcept;
  Status launch_kernel();
  // Returns false if the driver refused the launch, perhaps after some of its pages.
  bool launch_engines();

  const std::shared_ptr<Context> context_;  // outlives the memory that is allocated in it
  uint32_t blocks_;                         // per launch
  Module module_;
  std::array<OwnedStream, kStreams> streams_;
  PinnedMemory pinned_;            // each stream's number of finished launches, then kLaunches lists of pages
  DevicePointer blocks_done_ = 0;  // one counter per stream
  Function bulk_ = nullptr;        // null before Hopper
  Function vector_ = nullptr;
  // The driver copies batches with the engines and has refused none. Single copies would be late, at 2.5 us per page.
  bool engines_ = false;

  uint64_t launched_ = 0;
  uint64_t finished_seen_ = 0;
  uint64_t page_bytes_ = 0;
  uint32_t pages_ = 0;
  uint64_t address_bits_ = 0;  // OR of all addresses and lengths of the launch, to test for multiples of 16
};

}  // namespace kvc::cuda
