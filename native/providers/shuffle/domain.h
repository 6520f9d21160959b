// ShuffleDomain: another domain behind a shuffled queue on either side.
//
//  - A batch is split into its pages; each is posted to the inner domain by itself, as a write of one page that counts
//    one, after 0..max_delay_us. So pages of one batch, batches of a link and links among each other are all mixed.
//  - What the inner domain reports of its own peer's writes waits as long again: immediates are told to the engine in
//    another order than they landed in, but never before they landed.
//  - Messages are sent in any order.
// Nothing is lost, repeated or invented: whatever the inner domain promises holds here, except order.
//
// One seed gives one sequence of delays; what that makes of the order depends on the inner domain's timing as well.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>

#include "engine/domain.h"
#include "engine/unique_fd.h"

namespace kvc::shuffle {

class ShuffleDomain final : public Domain, private DomainSink {
 public:
  static Result<std::unique_ptr<ShuffleDomain>> open(const DomainConfig& config, DomainSink& sink);

  std::string description() const override { return "shuffle over " + inner_->description(); }
  uint64_t bits_per_second() const override { return inner_->bits_per_second(); }
  DomainLimits limits() const override { return inner_->limits(); }
  Result<uint64_t> register_region(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) override;
  bool deregister_region(uint64_t rkey) override { return inner_->deregister_region(rkey); }
  Result<Bytes> offer(LinkId link) override { return renamed(inner_->offer(link)); }
  Result<Bytes> accept(LinkId link, std::span<const std::byte> offer) override;
  Status complete(LinkId link, std::span<const std::byte> answer) override;
  bool fence(LinkId link) override;
  Posted post(LinkId link, const WriteBatch& batch) override;
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override;
  bool poll() override;
  int fd() const override { return epoll_.get(); }
  bool prepare_sleep() override;

 private:
  using Clock = std::chrono::steady_clock;
  // When something is due, and a random number that mixes what is due at the same time.
  using Due = std::pair<Clock::time_point, uint64_t>;

  // A batch, or a message, that the group waits for.
  struct Work {
    LinkId link = 0;
    WorkId work = 0;
    size_t left = 0;  // pages that have not ended
    std::optional<Error> error;
  };
  // One page of a batch, or one message, on its way to the inner domain.
  struct Piece {
    uint64_t owner = 0;  // key of its Work
    LinkId link = 0;
    WriteBatch batch;  // without its page
    PageWrite page;
    Bytes message;  // not empty: a message
  };
  struct Landed {
    LinkId link = 0;
    uint32_t immediate = 0;
  };

  ShuffleDomain(const DomainConfig& config, DomainSink& sink)
      : sink_(sink), random_(config.seed), max_delay_us_(config.max_delay_us) {}

  void on_complete(WorkId work, const Error* error) noexcept override;
  void on_immediate(LinkId link, uint32_t immediate) noexcept override;
  bool on_message(LinkId link, std::span<const std::byte> message) noexcept override;
  void on_link_down(LinkId link, const Error& error, bool fenced) noexcept override;

  Due draw();
  uint64_t own(LinkId link, WorkId work, size_t pieces);
  void end_piece(uint64_t owner, const Error* error);
  bool post_due(Clock::time_point now);
  bool tell_due(Clock::time_point now);
  // The link has ended: what landed over it is told, and what was not posted yet ends with `error`.
  void tell_all(LinkId link);
  void drop_all(LinkId link, const Error& error);

  template <typename T>
  static T renamed(T result) {
    if (!result.ok()) result.error().provider = "shuffle";
    return result;
  }

  DomainSink& sink_;
  std::unique_ptr<Domain> inner_;
  UniqueFd epoll_;
  UniqueFd timer_;
  std::mt19937_64 random_;
  const uint32_t max_delay_us_;
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, Work> works_;
  std::unordered_map<WorkId, uint64_t> posted_;  // the inner domain's works: which of ours a piece belongs to
  std::multimap<Due, Piece> pieces_;
  std::multimap<Due, Landed> landed_;
};

}  // namespace kvc::shuffle
