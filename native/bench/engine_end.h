// One side of a measurement between two engines, in one process each: an engine, its buffer, and one peer.
//
// Failures are exceptions (std::runtime_error with the engine's words): this is a benchmark, not the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/transfer_engine.h"

namespace kvc::bench {

// The buffer's owner is the caller. One thread at a time may call an EngineEnd's methods, but for one.
class EngineEnd {
 public:
  // Opens an engine with these domains and registers the `buffer`. `memfd`: what backs it, or -1.
  EngineEnd(std::vector<DomainConfig> domains, uint32_t spin_us, std::byte* buffer, uint64_t buffer_bytes, int memfd);

  // The three steps of a link, see TransferEngine. `descriptor` and `import_region` follow in both directions.
  Bytes offer();
  Bytes accept(std::span<const std::byte> offer);
  void complete(std::span<const std::byte> answer);
  Bytes descriptor();
  void import_region(std::span<const std::byte> descriptor);

  // How long each of `iterations` single writes of `bytes` took in seconds, one after the other: from the call until
  // the thread that sleeps in wait_transfer() knows that it is in place. Counted on one of the peer's `immediates`.
  std::vector<double> singles(uint64_t bytes, uint32_t iterations, uint32_t immediate);

  // Registers [memory, memory + bytes) and deregisters it again. Any thread, beside what else is called: it is what other
  // measurements are disturbed by.
  void register_once(std::byte* memory, uint64_t bytes);

 protected:
  std::unique_ptr<TransferEngine> engine_;
  RegionId region_ = 0;
  RemoteRegionId remote_ = 0;
  PeerId peer_ = 0;
};

}  // namespace kvc::bench
