// Where the time of a scatter and of a barrier goes: the steps of the paper's Tables 8 and 9.
//
// One engine writes to `peers` engines, all of one process, each with a domain and a worker of its own. A step's time
// is taken where it happens, on the thread that it happens on; nothing of it needs Python.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/timed_domain.h"
#include "engine/transfer_engine.h"

namespace kvc::bench {

// Nanoseconds, one entry an iteration.
struct Steps {
  std::vector<double> submit;   // the application's call, from its beginning until it returns: it is enqueued then
  std::vector<double> dequeue;  // from there until the worker takes it (measured with a command of its own)
  std::vector<double> first;    // from enqueued until the domain is given the first write: dequeue included
  std::vector<double> last;     // from the first write given to the domain until it has taken the last one
  std::vector<double> done;     // from the beginning of the call until its final event is in the application's hands
};

// Failures are exceptions (std::runtime_error with the engine's words). One thread at a time may call its methods.
class GroupSteps {
 public:
  // Opens an engine with `domains` and `peers` engines with `peer_domains` each, and connects them. `slice_bytes`: what
  // a scatter writes to each peer. `timed`: posts are timed; without it Steps::first and last mean nothing, and posting
  // takes what it takes without a clock.
  GroupSteps(const std::vector<DomainConfig>& domains, const std::vector<DomainConfig>& peer_domains, uint32_t spin_us,
             uint32_t peers, uint64_t slice_bytes, bool timed = true);

  // Blocks until all iterations have ended.
  Steps scatter(uint32_t iterations);
  Steps barrier(uint32_t iterations);
  // The same, prepared once: what is measured is its submission.
  Steps prepared_scatter(uint32_t iterations);
  Steps prepared_barrier(uint32_t iterations);

  // What the initiator's domains call themselves.
  std::vector<std::string> domains() const;

 private:
  struct Member {
    std::vector<std::byte> memory;
    std::unique_ptr<TransferEngine> engine;
    RemoteRegionId region = 0;  // as the initiator knows it
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
