// The time of each step of a scatter and of a barrier: the steps of the paper's Tables 8 and 9.
//
// One engine writes to `peers` engines in the same process, each with its own domain and transfer thread. The time of a
// step is taken on the thread on which the step happens. None of it needs Python.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/timed_domain.h"
#include "engine/transfer_engine.h"

namespace kvc::bench {

// Nanoseconds, one entry per iteration.
struct Steps {
  std::vector<double> submit;   // the application's call until it returns; the command is enqueued then
  std::vector<double> dequeue;  // from enqueued until the transfer thread takes it (measured with a separate command)
  std::vector<double> first;    // from enqueued until the domain receives the first write; includes `dequeue`
  std::vector<double> last;     // from the first write given to the domain until it has taken the last one
  std::vector<double> done;     // from the start of the call until the application has its final event
};

// Failures are exceptions (std::runtime_error with the transfer engine's message). One thread at a time may call its
// methods.
class GroupSteps {
 public:
  // Opens a transfer engine with `domains` and `peers` engines with `peer_domains` each, and connects them.
  // `slice_bytes` is what a scatter writes to each peer. If `timed` is false, posts are not timed: they then take no
  // time for the clock, and Steps::first and last are meaningless.
  GroupSteps(const std::vector<DomainConfig>& domains, const std::vector<DomainConfig>& peer_domains, uint32_t spin_us,
             uint32_t peers, uint64_t slice_bytes, bool timed = true);

  // Both block until all iterations have ended.
  Steps scatter(uint32_t iterations);
  Steps barrier(uint32_t iterations);
  // As scatter() and barrier(), prepared once: only the submission is measured.
  Steps prepared_scatter(uint32_t iterations);
  Steps prepared_barrier(uint32_t iterations);

  // Returns the descriptions of the initiator's domains.
  std::vector<std::string> domains() const;

 private:
  struct Member {
    std::vector<std::byte> memory;
    std::unique_ptr<TransferEngine> engine;
    RemoteRegionId region = 0;  // the initiator's id of it
    uint32_t immediate = 0;
  };

  Steps submit(const std::vector<PreparedSlice>& slices, const std::vector<ScatterUpdate>& updates,
               uint32_t iterations);
  // `submit` opens the transfer that is measured.
  template <typename Submit>
  Steps measure(uint32_t iterations, Submit submit);
  double dequeue();

  PostClock clock_;
  std::vector<std::byte> source_;
  std::vector<Member> members_;
  std::unique_ptr<TransferEngine> engine_;
  RegionId region_ = 0;
  PeerGroupId group_ = 0;
  std::vector<ScatterSlice> slices_;
  std::vector<uint32_t> immediates_;
};

}  // namespace kvc::bench
