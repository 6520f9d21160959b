// The latency of a counted write between two engines, measured without Python.
//
// Each of two processes holds an EnginePingPong. One pings: it writes `bytes` bytes with an immediate. When the other
// side's counter is reached, it writes as many back. Half of the round trip is the one-way latency from a write to its
// counter. The answering side is notified in one of two ways. The counter's callback answers on the transfer thread, or
// a thread answers that sleeps in wait_counters(), as in any other user of the transfer engine.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/engine_end.h"

namespace kvc::bench {

// ping() and pong() block until the last iteration has ended.
class EnginePingPong : public EngineEnd {
 public:
  enum class Face { kWorker, kThread };

  using EngineEnd::EngineEnd;

  // Allocates one counter per iteration. Returns the immediates for the other side's ping() or pong().
  std::vector<uint32_t> prepare(uint32_t iterations);

  // Returns half of each round trip in microseconds. The other side must be in, or about to enter, pong(). It sleeps
  // `pause_us` before each write (0: writes back to back).
  std::vector<double> ping(Face face, const std::vector<uint32_t>& peer_immediates, uint64_t bytes, uint32_t pause_us);
  // Answers one ping for each prepared counter. Returns once all answers have arrived at the peer.
  void pong(Face face, const std::vector<uint32_t>& peer_immediates, uint64_t bytes);

 private:
  class Completion;

  // Writes `bytes`. If `signal_end`, signals `completion` once the write is in the peer's memory. A failure is always
  // reported to it.
  void write(uint32_t immediate, uint64_t bytes, const std::shared_ptr<Completion>& completion, bool signal_end);
  void release_counters();

  std::vector<CounterSet> counters_;  // one per iteration
};

}  // namespace kvc::bench
