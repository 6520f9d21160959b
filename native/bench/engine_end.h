// One side of a measurement between two engines, each in its own process: a transfer engine, its buffer, and one peer.
//
// Failures are exceptions (std::runtime_error with the transfer engine's message): this is a benchmark, not the
// transfer engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/transfer_engine.h"

namespace kvc::bench {

// The caller owns the buffer. One thread at a time may call an EngineEnd's methods, except register_once().
class EngineEnd {
 public:
  // Opens a transfer engine with these domains and registers the `buffer`. `memfd` is the descriptor behind the buffer,
  // or -1.
  EngineEnd(std::vector<DomainConfig> domains, uint32_t spin_us, std::byte* buffer, uint64_t buffer_bytes, int memfd);

  // The three steps of a link, see TransferEngine. `descriptor` and `import_region` follow in both directions.
  Bytes offer();
  Bytes accept(std::span<const std::byte> offer);
  void complete(std::span<const std::byte> answer);
  Bytes descriptor();
  void import_region(std::span<const std::byte> descriptor);

  // Returns the duration of each of `iterations` single writes of `bytes`, one after the other, in seconds. It is
  // measured from the call until a thread that sleeps in wait_transfer() has learned that the write is in place. Each
  // write counts on one of the peer's `immediates`.
  std::vector<double> singles(uint64_t bytes, uint32_t iterations, uint32_t immediate);

  // Registers [memory, memory + bytes) and deregisters it again. Any thread may call it beside other calls: it is the
  // disturbance in some measurements.
  void register_once(std::byte* memory, uint64_t bytes);

 protected:
  std::unique_ptr<TransferEngine> engine_;
  RegionId region_ = 0;
  RemoteRegionId remote_ = 0;
  PeerId peer_ = 0;
};

}  // namespace kvc::bench
