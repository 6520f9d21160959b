#include "bench/engine_end.h"

#include <chrono>
#include <stdexcept>
#include <utility>

#include "bench/checked.h"

namespace kvc::bench {
EngineEnd::EngineEnd(std::vector<DomainConfig> domains, uint32_t spin_us, std::byte* buffer, uint64_t buffer_bytes,
                     int memfd) {
  EngineConfig config;
  config.name = "bench";
  config.domains = std::move(domains);
  config.spin_us = spin_us;
  engine_ = checked(TransferEngine::create(std::move(config)));
  region_ = checked(engine_->register_memory(buffer, buffer_bytes, memfd, 0));
}

Bytes EngineEnd::offer() {
  Handshake handshake = checked(engine_->offer("target"));
  peer_ = handshake.peer;
  return std::move(handshake.bytes);
}

Bytes EngineEnd::accept(std::span<const std::byte> offer) {
  Handshake handshake = checked(engine_->accept("initiator", offer));
  peer_ = handshake.peer;
  return std::move(handshake.bytes);
}

void EngineEnd::complete(std::span<const std::byte> answer) { checked(engine_->complete(peer_, answer)); }

Bytes EngineEnd::descriptor() { return checked(engine_->region_descriptor(region_)); }

void EngineEnd::import_region(std::span<const std::byte> descriptor) {
  remote_ = checked(engine_->import_region(peer_, descriptor));
}

std::vector<double> EngineEnd::singles(uint64_t bytes, uint32_t iterations, uint32_t immediate) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> seconds;
  seconds.reserve(iterations);
  for (uint32_t i = 0; i < iterations; ++i) {
    const Clock::time_point start = Clock::now();
    const TransferId transfer = checked(engine_->write_one(peer_, region_, 0, remote_, 0, bytes, immediate));
    const Event event = checked(engine_->wait_transfer(transfer, kPatience));
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    if (event.error) throw std::runtime_error(event.error->to_string());
  }
  return seconds;
}

void EngineEnd::register_once(std::byte* memory, uint64_t bytes) {
  const RegionId region = checked(engine_->register_memory(memory, bytes));
  checked(engine_->deregister_memory(region, kPatience));
}

}  // namespace kvc::bench
