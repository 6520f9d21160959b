// DomainProxy: stands for a domain that another thread drives, on the thread that schedules.
//
// Calls of the scheduler are passed to the domain's thread and events of the domain are passed back, each in order. The
// scheduler therefore sees the contract of a normal domain. A batch is copied on the way, 1 KiB at most, which takes 50
// ns. Posting its 64 pages can cost fifty times as much.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/spsc_ring.h"
#include "base/submission_queue.h"
#include "base/waker.h"
#include "lane/domain.h"
#include "lane/immediate.h"

namespace kvc {

// The queues between the two threads.
struct DomainPassage {
  struct Batch {
    LinkId link = 0;
    WriteBatch write;  // its pages are the first ones of `pages`
    std::array<PageWrite, Immediate::kMaxMultiplicity> pages;
  };
  // Any call other than post().
  struct Request {
    enum class Kind : uint8_t { kPublish, kWithdraw, kAttach, kFence, kSend, kTake };
    Kind kind = Kind::kTake;
    LinkId link = 0;
    uint64_t value = 0;  // kSend: the WorkId; kTake: the slot
    Registration* region = nullptr;
    std::unique_ptr<LinkEnd> end{};
    Bytes message{};
    uint64_t after = 0;  // number of batches that were posted before this request
    Request* next = nullptr;
  };
  struct Told {
    enum class Kind : uint8_t { kCompletion, kFenced, kPublished, kWithdrawn };
    Kind kind = Kind::kCompletion;
    Completion completion;
    LinkId link = 0;                 // kFenced
    Registration* region = nullptr;  // kPublished, kWithdrawn
  };

  // 16 batches for each of 16 links. The links' windows are full before that.
  static constexpr size_t kBatches = 256;
  // Completions, 32 KiB of them. While the ring is full, the domain is not polled.
  static constexpr size_t kTold = 1024;

  explicit DomainPassage(std::shared_ptr<Waker> of_scheduler) : scheduler(std::move(of_scheduler)) {}

  SpscRing<Batch> batches{kBatches};
  SubmissionQueue<Request> requests;
  SpscRing<Told> told{kTold};
  const std::shared_ptr<Waker> scheduler;
  // Links for which the domain had no room at the last try. Links share entries by their ids, so a link may appear busy
  // because of another link.
  std::array<std::atomic<uint32_t>, 256> busy{};
  std::atomic<uint32_t>& busy_of(LinkId link) noexcept { return busy[link % busy.size()]; }
  // A post was refused, and no room has become free since.
  std::atomic<bool> refused{false};
};

class DomainProxy final : public Domain {
 public:
  // `wake` wakes the domain's thread. `close` ends the domain there, and blocks.
  DomainProxy(std::shared_ptr<DomainPassage> passage, std::function<void()> wake, std::function<void()> close)
      : passage_(std::move(passage)), wake_(std::move(wake)), close_(std::move(close)) {}
  ~DomainProxy() override;

  void publish(Registration& region) override;
  bool published(const Registration& region) const override { return !publishing_.contains(&region); }
  bool withdraw(Registration& region) override;
  void attach(LinkId link, std::unique_ptr<LinkEnd> end) override;
  bool fence(LinkId link) override;
  Posted post(LinkId link, const WriteBatch& batch) override;
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override;
  void take(LinkId link, uint32_t slot) override;
  bool poll() override;
  int fd() const override { return passage_->scheduler->fd(); }
  bool prepare_sleep() override;

 private:
  using Request = DomainPassage::Request;
  struct Link {
    uint32_t messages = 0;  // sent and not ended
    bool fencing = false;
  };
  void ask(Request request);
  bool has_room(LinkId link);
  bool room_again();
  bool listen();
  void hear(DomainPassage::Told& told);

  const std::shared_ptr<DomainPassage> passage_;
  const std::function<void()> wake_;
  const std::function<void()> close_;
  std::unordered_map<LinkId, Link> links_;
  std::unordered_map<WorkId, LinkId> messages_;
  std::unordered_set<const Registration*> publishing_;
  std::unordered_map<Registration*, bool> withdrawing_;  // true: the domain has released the region
  bool refused_ = false;
  bool announced_ = false;
};

// The domain itself, on its own thread.
class DrivenDomain {
 public:
  DrivenDomain(std::unique_ptr<Domain> domain, std::shared_ptr<DomainPassage> passage)
      : domain_(std::move(domain)), passage_(std::move(passage)) {}
  ~DrivenDomain();

  bool turn();
  bool prepare_sleep();
  // A fence or a withdrawal is not finished, and no descriptor reports its end.
  bool retries() const noexcept { return !steps_.empty(); }
  int fd() const { return domain_->fd(); }

 private:
  using Request = DomainPassage::Request;
  using Batch = DomainPassage::Batch;
  // Batches and messages for which the domain has no room, oldest first.
  struct Waiting {
    std::deque<Batch> batches;
    std::deque<std::unique_ptr<Request>> messages;
  };

  void begin(std::unique_ptr<Request> request);
  bool post_until(uint64_t until);
  bool post(Batch& batch);
  bool retry();
  bool step(Request& request);
  void drop(LinkId link);
  bool tell_completions();
  void tell(DomainPassage::Told told);

  const std::unique_ptr<Domain> domain_;
  const std::shared_ptr<DomainPassage> passage_;
  std::unordered_map<LinkId, Waiting> waiting_;
  std::vector<std::unique_ptr<Request>> steps_;  // fences and withdrawals
  std::deque<DomainPassage::Told> untold_;       // events for which the ring has no room
};

}  // namespace kvc
