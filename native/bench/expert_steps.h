// The time from a rank's call until its lanes get the first packet: experts between nodes, in host memory.
//
// Each rank is a node with one transfer engine. All ranks are in this process, and one thread makes their calls in
// turns. So no rank waits for another one, and only rank 0 is timed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/timed_domain.h"
#include "moe/far_ranks.h"
#include "moe/group.h"

namespace kvc::bench {

// Nanoseconds, one entry per iteration.
struct ExpertPhase {
  std::vector<double> submit;  // the call that sends, until it returns; it packs the rows, and submits the scatter
  std::vector<double> first;   // from its return until the domain receives the first write; negative if that is earlier
};

struct ExpertTimes {
  ExpertPhase dispatch;
  ExpertPhase combine;
};

// Failures are exceptions (std::runtime_error), as are wrong sums. One thread at a time may call its methods.
class ExpertSteps {
 public:
  // Opens the lanes of 1 + `peers` ranks. Each rank sends `tokens` rows of `row_bytes` to every other rank, and gets as
  // many results back. If `timed` is false, posts are not timed: they then take no time for the clock, and
  // ExpertPhase::first is meaningless.
  ExpertSteps(const std::vector<DomainConfig>& domains, const std::vector<DomainConfig>& peer_domains, uint32_t spin_us,
              uint32_t peers, uint32_t tokens, uint32_t row_bytes, bool timed = true);

  // Blocks until all iterations have ended. Each is one dispatch and one combine.
  ExpertTimes steps(uint32_t iterations);

 private:
  struct Rank {
    std::unique_ptr<moe::FarRanks> far;
    std::unique_ptr<moe::Group> group;  // uses `far`
    std::vector<uint16_t> sums;
  };

  void connect(uint32_t low, uint32_t high);
  void dispatch(Rank& rank, uint32_t phases);
  void combine(Rank& rank, uint32_t phases);
  // Lets all ranks send, rank 0 first, and then receive.
  template <typename Call>
  void run(ExpertPhase& phase, Call call);
  void check() const;

  const uint32_t row_bytes_;
  PostClock clock_;
  const std::vector<uint32_t> sizes_;
  const std::vector<uint16_t> rows_;
  const std::vector<moe::ColumnSpec> columns_;
  std::vector<Rank> ranks_;
};

}  // namespace kvc::bench
