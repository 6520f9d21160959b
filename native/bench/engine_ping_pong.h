// Latency of a counted write between two engines, measured without Python.
//
// Two processes each hold an EnginePingPong. One pings: it writes `bytes` bytes with an immediate; the other, told by
// its counter, writes as many back; half of the round trip is the one-way latency of a write to its counter.
// "Told" comes in two kinds: the counter's callback answers on the worker thread, or a thread that sleeps in
// wait_counters() does, as any other user of the engine would.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/engine_end.h"

namespace kvc::bench {

// ping() and pong() block until the last iteration.
class EnginePingPong : public EngineEnd {
 public:
  enum class Face { kWorker, kThread };

  using EngineEnd::EngineEnd;

  // Allocates one counter an iteration; returns the immediates for the other side's ping() or pong().
  std::vector<uint32_t> prepare(uint32_t iterations);

  // Half of each round trip in microseconds. The other side must be in, or about to enter, pong(). Before each write
  // it sleeps `pause_us` (0: writes back to back).
  std::vector<double> ping(Face face, const std::vector<uint32_t>& peer_immediates, uint64_t bytes, uint32_t pause_us);
  // Answers as many pings; returns once all answers have arrived at the peer.
  void pong(Face face, const std::vector<uint32_t>& peer_immediates, uint64_t bytes);

 private:
  class Completion;

  // `signal_end`: signal `completion` once the write is in the peer's memory (a failure is always reported to it).
  void write(uint32_t immediate, uint64_t bytes, const std::shared_ptr<Completion>& completion, bool signal_end);
  void release_counters();

  std::vector<CounterSet> counters_;  // one a iteration
};

}  // namespace kvc::bench
