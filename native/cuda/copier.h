// Copier: the GPU's copies of one domain. Each launch copies scattered pages, on a low-priority stream: few of them by the
// GPU's copy engines, which neither wait for an SM nor take one from the kernels that compute; more by one kernel.
//
// Launches take turns on several streams, so that one fills the link while another begins or ends. They are reported as
// finished in the order in which they began. It is opened, and ends, where that may block; in between it is one thread's,
// and blocks nothing but where the driver refuses both ways: until what had begun has ended.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/error.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"

namespace kvc::cuda {

// What one launch carries at most: 32 MiB take 90 us at 350 GB/s, and its completions are not long in coming.
inline constexpr uint64_t kLaunchBytes = 32 << 20;
inline constexpr uint32_t kLaunchPages = 4096;
// Launches of up to this many pages go by the copy engines, where each takes 1.3 us. Two H200s, pages of 64 KiB, us by the
// kernel and by the engines: one page 12 and 9 on an idle GPU, 35 to 256 and 9 to 17 beside kernels that fill it; 16 pages
// 16 and 28, 40 to 256 and 28 to 36. So up to 16 are not later beside kernels, where pages come from, and cost those under
// 1 % of their time in place of 1 to 8 %.
inline constexpr uint32_t kEnginePages = 16;
// From one launch's last block to the next one's first bytes its stream stands still for some 15 us. Measured between
// two H200s, 1 GiB of 64 KiB pages on 16 SMs: one stream 321 GB/s, two 348. Four streams with launches of 4 MiB, which
// leave the SMs to the prefill sooner: 308, and the prefill was not faster for it.
inline constexpr uint32_t kStreams = 2;
// Launches under way at once: enough that the GPU does not wait for the worker.
inline constexpr uint32_t kLaunches = 8;
static_assert(kLaunches % kStreams == 0, "a list's place also says its stream");

class Copier {
 public:
  // On the device of `context`, with at most `blocks` blocks at a time (at least one a stream), each on its own SM. Blocks.
  static Result<std::unique_ptr<Copier>> open(std::shared_ptr<Context> context, uint32_t blocks);
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;
  // Waits for the launches.
  ~Copier();

  const Context& context() const noexcept { return *context_; }

  // --- One launch: begin(), add() while there is room, then launch().
  bool can_begin() const noexcept { return launched_ - finished_seen_ < kLaunches; }
  void begin(uint64_t page_bytes) noexcept;
  // `pages` of begin()'s length fit in addition. An empty launch has room for any batch.
  bool has_room(uint32_t pages) const noexcept {
    return pages_ == 0 || (pages_ + pages <= kLaunchPages && (pages_ + pages) * page_bytes_ <= kLaunchBytes);
  }
  void add(uint64_t source, uint64_t target) noexcept;
  // Hands it to the GPU; its number is then launched(). With no page added there is nothing to do, and no number is
  // used.
  Status launch();

  uint64_t launched() const noexcept { return launched_; }
  // Every launch up to this number has ended: its bytes are in place, and its sources may be overwritten.
  uint64_t finished() noexcept;
  bool idle() noexcept { return finished() == launched_; }
  // What the GPU says of the launches under way: an error is final, nothing of this process runs there any more.
  Status health() const;
  // Any thread, when nothing is launched any more. Blocks until all launches have ended, or nothing runs there any more.
  void wait() const;

 private:
  Copier(std::shared_ptr<Context> context, uint32_t blocks) : context_(std::move(context)), blocks_(blocks) {}
  // The list of pages of the launch that is gathered.
  PageCopy* list() const noexcept;
  Status launch_kernel();
  // False: the driver has refused it, perhaps after some of its pages.
  bool launch_engines();

  const std::shared_ptr<Context> context_;  // outlives what is allocated in it
  uint32_t blocks_;                         // of one launch
  Module module_;
  std::array<OwnedStream, kStreams> streams_;
  PinnedMemory pinned_;            // each stream's word of finished launches, then kLaunches lists of pages
  DevicePointer blocks_done_ = 0;  // a counter a stream
  Function bulk_ = nullptr;        // null before Hopper
  Function vector_ = nullptr;
  // The driver takes batches for them, and has refused none. Page by page they would be late, at 2.5 us each.
  bool engines_ = false;

  uint64_t launched_ = 0;
  uint64_t finished_seen_ = 0;
  uint64_t page_bytes_ = 0;
  uint32_t pages_ = 0;
  uint64_t address_bits_ = 0;  // all addresses and lengths of the launch, or-ed: are they multiples of 16?
};

}  // namespace kvc::cuda
