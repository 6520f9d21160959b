// ShuffleDomain: another domain behind a shuffled queue on either side.
//
// - A batch is split into its pages. Each page is posted to the inner domain as a write of one page that counts one,
//   after 0..max_delay_us. So pages of one batch, batches of a link and the links are all mixed.
// - Events that the inner domain reports of its peer's writes wait again for 0..max_delay_us. The transfer engine
//   receives immediates in another order than they landed in, but never before they landed.
// - Messages are sent in any order.
// Nothing is lost, repeated or invented: all promises of the inner domain hold here, except order.
//
// One seed gives one sequence of delays. The resulting order depends on the inner domain's timing as well.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <unordered_map>
#include <utility>

#include "base/timer_fd.h"
#include "base/unique_fd.h"
#include "lane/domain.h"

namespace kvc::shuffle {

class ShuffleDomain final : public Domain {
 public:
  static Result<std::unique_ptr<ShuffleDomain>> open(const DomainConfig& config, std::unique_ptr<Domain> inner);

  void publish(Registration& region) override { inner_->publish(region); }
  bool withdraw(Registration& region) override { return inner_->withdraw(region); }
  void attach(LinkId link, std::unique_ptr<LinkEnd> end) override { inner_->attach(link, std::move(end)); }
  bool fence(LinkId link) override;
  Posted post(LinkId link, const WriteBatch& batch) override;
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override;
  void take(LinkId link, uint32_t slot) override { inner_->take(link, slot); }
  bool poll() override;
  int fd() const override { return epoll_.get(); }
  bool prepare_sleep() override;

 private:
  using Clock = TimerFd::Clock;
  // The time at which an item is due, and a random number that mixes items with the same time.
  using Due = std::pair<Clock::time_point, uint64_t>;

  // A batch or message whose completion the transfer engine awaits.
  struct Work {
    LinkId link = 0;
    WorkId work = 0;
    size_t left = 0;  // pages that have not completed
    bool message = false;
    std::optional<Error> error{};
  };
  // One page of a batch, or one message, that waits to be posted to the inner domain.
  struct HeldPage {
    uint64_t owner = 0;  // key of its Work
    LinkId link = 0;
    WriteBatch batch;  // without its pages
    PageWrite page;
    Bytes message;  // not empty if this is a message
  };
  struct Landed {
    LinkId link = 0;
    uint32_t immediate = 0;
  };

  ShuffleDomain(const DomainConfig& config, std::unique_ptr<Domain> inner)
      : inner_(std::move(inner)), random_(config.seed), max_delay_us_(config.max_delay_us) {}

  Due draw();
  uint64_t own(Work work);
  void end_piece(uint64_t owner, const Error* error);
  bool post_due(Clock::time_point now);
  bool tell_due(Clock::time_point now);
  // Takes the inner domain's completions.
  bool listen();
  void hear(Completion& completion);
  // Called when the link has ended. tell_all() reports all that landed over the link. drop_all() completes with `error`
  // all that was not posted yet.
  void tell_all(LinkId link);
  void drop_all(LinkId link, const Error& error);

  const std::unique_ptr<Domain> inner_;
  UniqueFd epoll_;
  TimerFd timer_;
  std::mt19937_64 random_;
  const uint32_t max_delay_us_;
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, Work> works_;
  size_t batches_ = 0;                           // how many of `works_` are batches
  std::unordered_map<WorkId, uint64_t> posted_;  // the key of the Work to which each work of the inner domain belongs
  std::multimap<Due, HeldPage> pieces_;
  std::multimap<Due, Landed> landed_;
};

}  // namespace kvc::shuffle
