#include "bench/micro.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "bench/checked.h"
#include "bench/timed_domain.h"
#include "engine/counter_sets.h"
#include "engine/transfer_engine.h"

namespace kvc::bench {
namespace {

// Microseconds for which the transfer thread spins, so that it never sleeps during a measurement. Waking it up is a
// system call, which is measured elsewhere (latency).
constexpr uint32_t kAwake = 1'000'000;

// Two engines of this process, connected over sim without any delay.
class SimPair {
 public:
  explicit SimPair(uint64_t bytes)
      : source_(bytes),
        target_(bytes),
        sender_(open("sender", TimedDomain::factory(clock_))),
        receiver_(open("receiver", open_domain)) {
    Handshake offer = checked(sender_->offer("receiver"));
    Handshake answer = checked(receiver_->accept("sender", offer.bytes));
    checked(sender_->complete(offer.peer, answer.bytes));
    peer_ = offer.peer;
    region_ = checked(sender_->register_memory(source_.data(), bytes));
    const RegionId target = checked(receiver_->register_memory(target_.data(), bytes));
    remote_ = checked(sender_->import_region(peer_, checked(receiver_->region_descriptor(target))));
    immediate_ = checked(receiver_->alloc_counters(1)).immediates.front();
  }

  TransferEngine& sender() { return *sender_; }
  PostClock& clock() { return clock_; }
  PeerId peer() const { return peer_; }
  RegionId source() const { return region_; }
  RemoteRegionId target() const { return remote_; }
  uint32_t immediate() const { return immediate_; }

  // Blocks until the transfer has ended.
  void wait(TransferId transfer) {
    const Event event = checked(sender_->wait_transfer(transfer, kPatience));
    if (event.error) throw std::runtime_error(event.error->to_string());
  }

 private:
  static std::unique_ptr<TransferEngine> open(const char* name, DomainFactory factory) {
    DomainConfig domain;
    domain.provider = "sim";
    domain.fabric = "micro";
    domain.max_delay_us = 0;
    EngineConfig config;
    config.name = name;
    config.domains = {domain};
    config.spin_us = kAwake;
    config.open = std::move(factory);
    return checked(TransferEngine::create(std::move(config)));
  }

  PostClock clock_;
  std::vector<std::byte> source_;
  std::vector<std::byte> target_;
  std::unique_ptr<TransferEngine> sender_;
  std::unique_ptr<TransferEngine> receiver_;
  PeerId peer_ = 0;
  RegionId region_ = 0;
  RemoteRegionId remote_ = 0;
  uint32_t immediate_ = 0;
};

constexpr uint64_t kSmallPage = 64;

}  // namespace

std::vector<double> submit_write(uint32_t iterations) {
  SimPair pair(kSmallPage);
  std::vector<double> nanoseconds(iterations);
  const TransferId transfer = checked(pair.sender().open_transfer(pair.peer()));
  for (double& spent : nanoseconds) {
    const int64_t start = PostClock::now();
    const Status status =
        pair.sender().write(transfer, pair.source(), 0, pair.target(), 0, kSmallPage, pair.immediate());
    spent = static_cast<double>(PostClock::now() - start);
    checked(status);
  }
  checked(pair.sender().seal(transfer));
  pair.wait(transfer);
  return nanoseconds;
}

std::vector<double> submit_write_one(uint32_t iterations) {
  SimPair pair(kSmallPage);
  std::vector<double> nanoseconds(iterations);
  std::vector<TransferId> transfers(iterations);
  for (uint32_t i = 0; i < iterations; ++i) {
    const int64_t start = PostClock::now();
    Result<TransferId> transfer =
        pair.sender().write_one(pair.peer(), pair.source(), 0, pair.target(), 0, kSmallPage, pair.immediate());
    nanoseconds[i] = static_cast<double>(PostClock::now() - start);
    transfers[i] = checked(std::move(transfer));
  }
  for (const TransferId transfer : transfers) pair.wait(transfer);
  return nanoseconds;
}

std::vector<double> post_pages(uint32_t iterations, uint32_t pages, uint64_t page_bytes) {
  // Writes every other page, so that no two pages are one write.
  SimPair pair(2 * pages * page_bytes);
  PagedWrite write;
  write.page_bytes = page_bytes;
  write.source = pair.source();
  write.target = pair.target();
  for (uint32_t i = 0; i < pages; ++i) write.source_pages.indices.push_back(i);
  write.source_pages.stride = 2 * page_bytes;
  write.target_pages = write.source_pages;
  write.immediate = pair.immediate();
  std::vector<double> nanoseconds;
  for (uint32_t i = 0; i < iterations; ++i) {
    pair.clock().reset();
    const TransferId transfer = checked(pair.sender().open_transfer(pair.peer()));
    checked(pair.sender().write_pages(transfer, write));
    checked(pair.sender().seal(transfer));
    pair.wait(transfer);
    nanoseconds.push_back(static_cast<double>(pair.clock().last() - pair.clock().first()) / pages);
  }
  return nanoseconds;
}

double count_immediates(uint64_t immediates, uint32_t counters) {
  constexpr PeerId kPeer = 1;
  struct AtOnce final : ControlQueue {
    void run(std::function<void()> task) override { task(); }
  } control;
  CounterSets sets;
  const CounterSet set = checked(sets.allocate(counters, {kPeer}));
  // The targets are never reached: work after a reached target happens once a layer, and counting once a page.
  checked(sets.expect(set.id, std::vector<uint64_t>(counters, immediates + 1), {}, nullptr, 0, control));
  const int64_t start = PostClock::now();
  uint64_t stale = 0;
  for (uint64_t i = 0, counter = 0; i < immediates; ++i) {
    stale += sets.add(set.immediates[counter], kPeer).stale ? 1 : 0;
    if (++counter == counters) counter = 0;
  }
  const double seconds = static_cast<double>(PostClock::now() - start) / 1e9;
  if (stale != 0) throw std::runtime_error("an immediate of an allocated counter counted as stale");
  return static_cast<double>(immediates) / seconds;
}

double clock_cost() {
  std::vector<double> nanoseconds(1000);
  for (double& spent : nanoseconds) {
    const int64_t start = PostClock::now();
    spent = static_cast<double>(PostClock::now() - start);
  }
  std::nth_element(nanoseconds.begin(), nanoseconds.begin() + 500, nanoseconds.end());
  return nanoseconds[500];
}

}  // namespace kvc::bench
