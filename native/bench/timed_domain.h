// A domain that records the times of its posts: the "first post" and "last post" of the benchmarks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "lane/domain.h"

namespace kvc::bench {

// The times of the first and last post since reset(). The transfer thread writes them. Another thread reads them once a
// transfer has ended.
class PostClock {
 public:
  using Clock = std::chrono::steady_clock;

  void reset() noexcept {
    first_.store(0, std::memory_order_relaxed);
    last_.store(0, std::memory_order_release);
  }
  // begin() and end() enclose one post().
  void begin() noexcept {
    if (first_.load(std::memory_order_relaxed) == 0) first_.store(now(), std::memory_order_relaxed);
  }
  void end() noexcept { last_.store(now(), std::memory_order_release); }

  // In nanoseconds on the steady clock; 0: nothing was posted.
  int64_t first() const noexcept { return first_.load(std::memory_order_acquire); }
  int64_t last() const noexcept { return last_.load(std::memory_order_acquire); }

  static int64_t now() noexcept { return Clock::now().time_since_epoch().count(); }

 private:
  std::atomic<int64_t> first_{0};
  std::atomic<int64_t> last_{0};
};

// Forwards everything to the inner domain, and records the times of posts.
class TimedDomain final : public Domain {
 public:
  TimedDomain(std::unique_ptr<Domain> inner, PostClock& clock) : inner_(std::move(inner)), clock_(clock) {}

  // Returns a factory that wraps what open_domain() opens. `clock` must outlive the transfer engine.
  static DomainFactory factory(PostClock& clock) {
    return [&clock](const DomainConfig& config, ControlQueue& control) -> Result<OpenedDomain> {
      Result<OpenedDomain> opened = open_domain(config, control);
      if (opened) opened.value().domain = std::make_unique<TimedDomain>(std::move(opened.value().domain), clock);
      return opened;
    };
  }

  Posted post(LinkId link, const WriteBatch& batch) override {
    clock_.begin();
    const Posted posted = inner_->post(link, batch);
    clock_.end();
    return posted;
  }

  void publish(Registration& region) override { inner_->publish(region); }
  bool withdraw(Registration& region) override { return inner_->withdraw(region); }
  void attach(LinkId link, std::unique_ptr<LinkEnd> end) override { inner_->attach(link, std::move(end)); }
  bool fence(LinkId link) override {
    const bool fenced = inner_->fence(link);
    pass_on();
    return fenced;
  }
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override {
    return inner_->send(link, work, message);
  }
  void take(LinkId link, uint32_t slot) override { inner_->take(link, slot); }
  bool poll() override {
    const bool any = inner_->poll();
    pass_on();
    return any;
  }
  int fd() const override { return inner_->fd(); }
  bool prepare_sleep() override { return inner_->prepare_sleep() && inner_->completions().empty(); }

 private:
  void pass_on() {
    inner_->completions().drain([this](Completion& completion) { completions_.put(std::move(completion)); });
  }

  const std::unique_ptr<Domain> inner_;
  PostClock& clock_;
};

}  // namespace kvc::bench
