// Nics: domains of any provider that a test can break, silence or delay, and that can refuse memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/transfer_engine.h"
#include "lane/domain.h"

namespace kvc::test {

// A test's control over one domain.
class Nic {
 public:
  // --- To be set while no call runs. Both are called on the control thread.

  // The error that the domain returns. No value: it takes the memory.
  std::function<std::optional<Error>(const MemoryRange&)> refuses;
  // Called before "register_memory", "offer", "accept" and "complete". It may block.
  std::function<void(std::string_view call)> control_work;

  // --- Any thread.

  // Kills the device: its links break, and it makes no new ones.
  void die() {
    dead_ = true;
    // Wakes a thread that sleeps, so that it notices.
    control_.load()->run([] {});
  }
  // Acknowledgements no longer return over it. Posted writes land and are counted, and end with their link.
  void withhold_acknowledgements() { withholds_ = true; }
  // Accepts work, sends none of it and reports nothing, until it is dead.
  void go_silent() {
    withholds_ = true;
    silent_ = true;
  }
  // How much work it has accepted since it is silent.
  int swallowed() const { return swallowed_; }
  // `ends` is called in each fence() and withdraw(), on the thread that drives the domain. While it returns false, the
  // call does not finish.
  void set_ends(std::function<bool()> ends) { ends_ = std::make_shared<const std::function<bool()>>(std::move(ends)); }

  // --- The domain's two halves.

  void open(ControlQueue& control) { control_ = &control; }
  std::optional<Error> check(std::string_view call) const {
    if (control_work) control_work(call);
    if (!dead_) return std::nullopt;
    return Error{ErrorCode::kSystem, "nic", {}, std::string(call), kDead};
  }
  bool dead() const { return dead_; }
  bool withholds() const { return withholds_; }
  bool silent() const { return silent_; }
  void swallow() { ++swallowed_; }
  bool ends() const {
    const auto ends = ends_.load();
    return ends == nullptr || (*ends)();
  }

  static constexpr const char* kDead = "the device has failed";

 private:
  std::atomic<bool> dead_{false};
  std::atomic<bool> withholds_{false};
  std::atomic<bool> silent_{false};
  std::atomic<int> swallowed_{0};
  std::atomic<ControlQueue*> control_{nullptr};
  std::atomic<std::shared_ptr<const std::function<bool()>>> ends_;
};

class NicConnector final : public Connector {
 public:
  NicConnector(std::unique_ptr<Connector> inner, Nic& nic) : inner_(std::move(inner)), nic_(nic) {}

  std::string description() const override { return inner_->description(); }
  uint64_t bits_per_second() const override { return inner_->bits_per_second(); }
  DomainLimits limits() const override { return inner_->limits(); }
  Result<std::unique_ptr<Registration>> register_memory(const MemoryRange& range) override {
    if (nic_.control_work) nic_.control_work("register_memory");
    if (nic_.refuses) {
      if (std::optional<Error> why = nic_.refuses(range)) return *std::move(why);
    }
    return inner_->register_memory(range);
  }
  Result<Bytes> offer(LinkId link) override {
    if (std::optional<Error> why = nic_.check("offer")) return *std::move(why);
    return inner_->offer(link);
  }
  Result<Accepted> accept(LinkId link, std::span<const std::byte> offer) override {
    if (std::optional<Error> why = nic_.check("accept")) return *std::move(why);
    return inner_->accept(link, offer);
  }
  Result<std::unique_ptr<LinkEnd>> complete(LinkId link, std::span<const std::byte> answer) override {
    if (std::optional<Error> why = nic_.check("complete")) {
      inner_->withdraw(link);
      return *std::move(why);
    }
    return inner_->complete(link, answer);
  }
  void withdraw(LinkId link) override { inner_->withdraw(link); }
  int fd() const override { return inner_->fd(); }
  void serve() override { inner_->serve(); }

 private:
  const std::unique_ptr<Connector> inner_;
  Nic& nic_;
};

class NicDomain final : public Domain {
 public:
  NicDomain(std::unique_ptr<Domain> inner, Nic& nic) : inner_(std::move(inner)), nic_(nic) {}

  void publish(Registration& region) override { inner_->publish(region); }
  bool published(const Registration& region) const override { return inner_->published(region); }
  bool withdraw(Registration& region) override { return nic_.ends() && inner_->withdraw(region); }
  void attach(LinkId link, std::unique_ptr<LinkEnd> end) override {
    inner_->attach(link, std::move(end));
    links_.push_back(link);
    told_ = false;
  }
  bool fence(LinkId link) override {
    const bool fenced = nic_.ends() && inner_->fence(link);
    if (fenced) std::erase(links_, link);
    pass_on();
    if (fenced) {
      for (const WorkId work : std::exchange(withheld_, {})) {
        completions_.failed(work, Error{ErrorCode::kPeerDown, "nic", {}, "fence", "it was never acknowledged"});
      }
    }
    return fenced;
  }
  Posted post(LinkId link, const WriteBatch& batch) override {
    return nic_.silent() ? swallow(batch.work) : inner_->post(link, batch);
  }
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override {
    return nic_.silent() ? swallow(work) : inner_->send(link, work, message);
  }
  void take(LinkId link, uint32_t slot) override { inner_->take(link, slot); }
  bool poll() override {
    bool any = inner_->poll();
    any |= pass_on();
    if (nic_.dead() && !std::exchange(told_, true)) {
      for (const LinkId link : links_) {
        completions_.link_down(link, Error{ErrorCode::kPeerDown, "nic", {}, "poll", Nic::kDead});
      }
      any = true;
    }
    return any;
  }
  int fd() const override { return inner_->fd(); }
  bool prepare_sleep() override {
    return inner_->prepare_sleep() && inner_->completions().empty() && (told_ || !nic_.dead());
  }

 private:
  bool pass_on() {
    return inner_->completions().drain([this](Completion& completion) {
      const bool acknowledges = completion.kind == Completion::Kind::kWork && completion.error() == nullptr;
      if (acknowledges && nic_.withholds()) {
        withheld_.push_back(completion.work());
      } else {
        completions_.put(std::move(completion));
      }
    });
  }
  Posted swallow(WorkId work) {
    withheld_.push_back(work);
    nic_.swallow();
    return Posted::kYes;
  }

  const std::unique_ptr<Domain> inner_;
  Nic& nic_;
  std::vector<LinkId> links_;
  std::vector<WorkId> withheld_;  // of its one link, if a test withholds acknowledgements: the domain then has one peer
  bool told_ = false;             // whether its death was reported to all existing links
};

// The Nics of one transfer engine, in the order of EngineConfig::domains. They outlive the transfer engine.
class Nics {
 public:
  Nic& operator[](size_t i) {
    while (nics_.size() <= i) nics_.emplace_back();
    return nics_[i];
  }
  // The configuration with its domains opened through these Nics.
  EngineConfig with(EngineConfig config) {
    config.open = [this](const DomainConfig& domain, ControlQueue& control) -> Result<OpenedDomain> {
      Result<OpenedDomain> opened = open_domain(domain, control);
      Nic& nic = (*this)[opened_++];
      if (!opened) return opened;
      nic.open(control);
      opened.value().connector = std::make_unique<NicConnector>(std::move(opened.value().connector), nic);
      opened.value().domain = std::make_unique<NicDomain>(std::move(opened.value().domain), nic);
      return opened;
    };
    return config;
  }

 private:
  std::deque<Nic> nics_;
  size_t opened_ = 0;
};

}  // namespace kvc::test
