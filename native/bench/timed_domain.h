// A domain that notes when it is given work: what "first post" and "last post" mean in the benchmarks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "engine/domain.h"

namespace kvc::bench {

// When the worker posted since reset(). Written by the worker; read by another thread once a transfer has ended.
class PostClock {
 public:
  using Clock = std::chrono::steady_clock;

  void reset() noexcept {
    first_.store(0, std::memory_order_relaxed);
    last_.store(0, std::memory_order_release);
  }
  // Around one post().
  void begin() noexcept {
    if (first_.load(std::memory_order_relaxed) == 0) first_.store(now(), std::memory_order_relaxed);
  }
  void end() noexcept { last_.store(now(), std::memory_order_release); }

  // Nanoseconds on the steady clock; 0: nothing was posted.
  int64_t first() const noexcept { return first_.load(std::memory_order_acquire); }
  int64_t last() const noexcept { return last_.load(std::memory_order_acquire); }

  static int64_t now() noexcept { return Clock::now().time_since_epoch().count(); }

 private:
  std::atomic<int64_t> first_{0};
  std::atomic<int64_t> last_{0};
};

// Everything is the inner domain's; posts are noted on the way.
class TimedDomain final : public Domain {
 public:
  TimedDomain(std::unique_ptr<Domain> inner, PostClock& clock) : inner_(std::move(inner)), clock_(clock) {}

  // Wraps what open_domain() opens. `clock` must outlive the engine.
  static DomainFactory factory(PostClock& clock) {
    return [&clock](const DomainConfig& config, DomainSink& sink) -> Result<std::unique_ptr<Domain>> {
      Result<std::unique_ptr<Domain>> inner = open_domain(config, sink);
      if (!inner) return inner.error();
      return std::unique_ptr<Domain>(std::make_unique<TimedDomain>(std::move(inner.value()), clock));
    };
  }

  Posted post(LinkId link, const WriteBatch& batch) override {
    clock_.begin();
    const Posted posted = inner_->post(link, batch);
    clock_.end();
    return posted;
  }

  std::string description() const override { return inner_->description(); }
  uint64_t bits_per_second() const override { return inner_->bits_per_second(); }
  DomainLimits limits() const override { return inner_->limits(); }
  Result<uint64_t> register_region(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) override {
    return inner_->register_region(base, bytes, memfd, memfd_offset);
  }
  bool deregister_region(uint64_t rkey) override { return inner_->deregister_region(rkey); }
  Result<Bytes> offer(LinkId link) override { return inner_->offer(link); }
  Result<Bytes> accept(LinkId link, std::span<const std::byte> offer) override { return inner_->accept(link, offer); }
  Status complete(LinkId link, std::span<const std::byte> answer) override { return inner_->complete(link, answer); }
  bool fence(LinkId link) override { return inner_->fence(link); }
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override {
    return inner_->send(link, work, message);
  }
  bool poll() override { return inner_->poll(); }
  int fd() const override { return inner_->fd(); }
  bool prepare_sleep() override { return inner_->prepare_sleep(); }

 private:
  const std::unique_ptr<Domain> inner_;
  PostClock& clock_;
};

}  // namespace kvc::bench
