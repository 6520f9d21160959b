#include "bench/group_steps.h"

#include <chrono>
#include <semaphore>
#include <stdexcept>
#include <utility>

#include "bench/checked.h"

namespace kvc::bench {
namespace {

std::unique_ptr<TransferEngine> open(const std::string& name, const std::vector<DomainConfig>& domains,
                                     uint32_t spin_us, DomainFactory factory) {
  EngineConfig config;
  config.name = name;
  config.domains = domains;
  config.spin_us = spin_us;
  config.open = std::move(factory);
  return checked(TransferEngine::create(std::move(config)));
}

}  // namespace

GroupSteps::GroupSteps(const std::vector<DomainConfig>& domains, const std::vector<DomainConfig>& peer_domains,
                       uint32_t spin_us, uint32_t peers, uint64_t slice_bytes, bool timed)
    : source_(peers * slice_bytes),
      members_(peers),
      engine_(open("initiator", domains, spin_us, timed ? TimedDomain::factory(clock_) : open_domain)),
      region_(checked(engine_->register_memory(source_.data(), source_.size()))) {
  std::vector<PeerId> ids;
  for (uint32_t i = 0; i < peers; ++i) {
    Member& member = members_[i];
    member.memory.resize(slice_bytes);
    // Members sleep as soon as they can, because only the initiator's transfer thread is measured.
    member.engine = open("member " + std::to_string(i), peer_domains, 0, open_domain);
    Handshake offer = checked(engine_->offer("member " + std::to_string(i)));
    Handshake answer = checked(member.engine->accept("initiator", offer.bytes));
    checked(engine_->complete(offer.peer, answer.bytes));
    const RegionId region = checked(member.engine->register_memory(member.memory.data(), member.memory.size()));
    member.region = checked(engine_->import_region(offer.peer, checked(member.engine->region_descriptor(region))));
    member.immediate = checked(member.engine->alloc_counters(1)).immediates.front();
    ids.push_back(offer.peer);
    slices_.push_back({i * slice_bytes, member.region, 0, slice_bytes, member.immediate});
    immediates_.push_back(member.immediate);
  }
  group_ = checked(engine_->add_peer_group(ids));
}

std::vector<std::string> GroupSteps::domains() const { return engine_->domains(); }

Steps GroupSteps::scatter(uint32_t iterations) {
  return measure(iterations, [this] { return engine_->scatter(group_, region_, slices_); });
}

Steps GroupSteps::barrier(uint32_t iterations) {
  return measure(iterations, [this] { return engine_->barrier(group_, immediates_); });
}

Steps GroupSteps::prepared_scatter(uint32_t iterations) {
  std::vector<PreparedSlice> slices;
  std::vector<ScatterUpdate> updates;
  for (const ScatterSlice& slice : slices_) {
    slices.push_back({static_cast<uint32_t>(slices.size()), region_, slice.source_offset, slice.target,
                      slice.target_offset, slice.bytes, slice.immediate});
    updates.push_back({.bytes = slice.bytes});
  }
  return submit(slices, updates, iterations);
}

Steps GroupSteps::prepared_barrier(uint32_t iterations) {
  std::vector<PreparedSlice> slices;
  for (const uint32_t immediate : immediates_) {
    slices.push_back({.member = static_cast<uint32_t>(slices.size()), .immediate = immediate});
  }
  return submit(slices, std::vector<ScatterUpdate>(slices.size()), iterations);
}

Steps GroupSteps::submit(const std::vector<PreparedSlice>& slices, const std::vector<ScatterUpdate>& updates,
                         uint32_t iterations) {
  const ScatterId scatter = checked(engine_->prepare_scatter(group_, slices));
  Steps steps = measure(iterations, [&] { return engine_->submit_scatter(scatter, updates); });
  checked(engine_->release_scatter(scatter));
  return steps;
}

template <typename Submit>
Steps GroupSteps::measure(uint32_t iterations, Submit submit) {
  Steps steps;
  for (uint32_t i = 0; i < iterations; ++i) {
    steps.dequeue.push_back(dequeue());
    clock_.reset();
    const int64_t start = PostClock::now();
    const TransferId transfer = checked(submit());
    const int64_t enqueued = PostClock::now();
    const Event event = checked(engine_->wait_transfer(transfer, kPatience));
    const int64_t done = PostClock::now();
    if (event.error) throw std::runtime_error(event.error->to_string());
    steps.submit.push_back(static_cast<double>(enqueued - start));
    // This is negative if the transfer thread posts before the call has returned.
    steps.first.push_back(static_cast<double>(clock_.first() - enqueued));
    steps.last.push_back(static_cast<double>(clock_.last() - clock_.first()));
    steps.done.push_back(static_cast<double>(done - start));
  }
  return steps;
}

// Measures the command queue alone. A counter set that is complete when its target is set travels to the transfer
// thread as a command. Its callback runs where the command is taken.
double GroupSteps::dequeue() {
  struct Taken {
    std::binary_semaphore done{0};
    int64_t at = 0;
  };
  const CounterSet set = checked(engine_->alloc_counters(1));
  const auto taken = std::make_shared<Taken>();
  checked(engine_->expect(set.id, {0}, [taken](const Event&) {
    taken->at = PostClock::now();
    taken->done.release();
  }));
  const int64_t enqueued = PostClock::now();
  if (!taken->done.try_acquire_for(kPatience))
    throw std::runtime_error("the transfer thread does not take its commands");
  checked(engine_->release_counters(set.id));
  return static_cast<double>(taken->at - enqueued);
}

}  // namespace kvc::bench
