// Helpers for tests of single providers: both halves of a domain driven by one thread, a record of its events, and
// batches.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lane/domain.h"
#include "lane/immediate.h"
#include "tests/rig.h"

namespace kvc::test {

// A control thread that runs its tasks when the test calls work().
class ManualControl final : public ControlQueue {
 public:
  void run(std::function<void()> task) override { tasks_.push_back(std::move(task)); }
  // Runs the waiting tasks, and tasks that these submit. Returns true if there was any.
  bool work() {
    const bool any = !tasks_.empty();
    while (!tasks_.empty()) {
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      task();
    }
    return any;
  }

 private:
  std::deque<std::function<void()>> tasks_;
};

// The recorded events of a domain.
struct Record {
  struct Down {
    LinkId link;
    Error error;
  };

  bool succeeded(WorkId work) const { return completed.contains(work) && !completed.at(work).has_value(); }
  std::optional<ErrorCode> failure(WorkId work) const {
    return completed.contains(work) && completed.at(work) ? std::optional(completed.at(work)->code) : std::nullopt;
  }

  std::map<WorkId, std::optional<Error>> completed;
  std::vector<WorkId> order;
  std::vector<uint32_t> immediates;
  std::vector<LinkId> immediate_links;  // the link over which each immediate arrived
  std::vector<std::pair<LinkId, Bytes>> messages;
  size_t message_room = SIZE_MAX;  // messages beyond this number are not taken
  uint64_t counted = 0;
  std::vector<Down> down;
};

// Both halves of a domain, and the regions registered with it.
class Driven {
 public:
  using Open = std::function<Result<OpenedDomain>(ControlQueue&)>;

  // Throws the text of the error if the domain cannot be opened.
  explicit Driven(const Open& open) : opened_(must(open(control_), "open")) {}
  Driven(const Driven&) = delete;
  Driven& operator=(const Driven&) = delete;
  ~Driven() {
    control_.work();
    opened_.domain.reset();
    control_.work();
    regions_.clear();
  }

  Connector& connector() { return *opened_.connector; }
  Domain& domain() { return *opened_.domain; }

  Result<uint64_t> register_region(std::byte* base, uint64_t bytes, int memfd = -1, uint64_t memfd_offset = 0) {
    auto region = connector().register_memory({base, bytes, memfd, memfd_offset});
    if (!region) return region.error();
    const uint64_t key = region.value()->key;
    domain().publish(*region.value());
    regions_[key] = std::move(region.value());
    return key;
  }
  // Returns true once the region is gone.
  bool deregister_region(uint64_t key) {
    const auto found = regions_.find(key);
    if (found == regions_.end()) return true;
    if (!domain().withdraw(*found->second)) return false;
    regions_.erase(found);
    return true;
  }

  Result<Bytes> offer(LinkId link) { return connector().offer(link); }
  Result<Bytes> accept(LinkId link, std::span<const std::byte> offer) {
    Result<Connector::Accepted> accepted = connector().accept(link, offer);
    if (!accepted) return accepted.error();
    domain().attach(link, std::move(accepted.value().end));
    return std::move(accepted.value().answer);
  }
  Status complete(LinkId link, std::span<const std::byte> answer) {
    Result<std::unique_ptr<LinkEnd>> end = connector().complete(link, answer);
    if (!end) return end.error();
    domain().attach(link, std::move(end.value()));
    return {};
  }
  // Ends the link, or the offer that was not completed.
  bool fence(LinkId link) {
    connector().withdraw(link);
    const bool fenced = domain().fence(link);
    drain();
    return fenced;
  }

  // A batch without a source gets the region, if any, that contains its first page.
  Posted post(LinkId link, WriteBatch batch) {
    if (batch.source == nullptr && batch.page_bytes > 0) {
      for (const auto& [key, region] : regions_) {
        const std::byte* const page = batch.pages.front().source;
        if (page >= region->base && page < region->base + region->bytes) batch.source = region.get();
      }
    }
    const Posted posted = domain().post(link, batch);
    drain();
    return posted;
  }
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) {
    const Posted posted = domain().send(link, work, message);
    drain();
    return posted;
  }

  bool poll() {
    bool any = control_.work();
    if (pollfd entry{connector().fd(), POLLIN, 0}; entry.fd >= 0 && ::poll(&entry, 1, 0) == 1) {
      connector().serve();
      any = true;
    }
    any |= domain().poll();
    any |= drain();
    any |= take_messages();
    return any;
  }
  bool prepare_sleep() { return domain().prepare_sleep() && domain().completions().empty() && !control_.work(); }
  std::vector<int> fds() {
    std::vector<int> fds{domain().fd()};
    if (connector().fd() >= 0) fds.push_back(connector().fd());
    return fds;
  }

  Record record;
  // Called for each completion after it was recorded. It may post, send, and fence.
  std::function<void(const Completion&)> on_completion;

 private:
  struct Untaken {
    LinkId link;
    uint32_t slot;
    Bytes bytes;
  };

  bool drain() {
    if (std::exchange(draining_, true)) return false;  // called from on_completion: the outer loop continues
    const bool any = domain().completions().drain([this](Completion& completion) { note(completion); });
    draining_ = false;
    return any;
  }
  void note(Completion& completion) {
    switch (completion.kind) {
      case Completion::Kind::kWork:
        EXPECT_EQ(record.completed.count(completion.work()), 0U) << "work " << completion.work() << " completed twice";
        record.completed[completion.work()] =
            completion.error() == nullptr ? std::nullopt : std::optional(*completion.error());
        record.order.push_back(completion.work());
        break;
      case Completion::Kind::kImmediate:
        record.immediate_links.push_back(completion.link);
        record.immediates.push_back(completion.immediate());
        record.counted += Immediate::decode(completion.immediate()).multiplicity;
        break;
      case Completion::Kind::kMessage:
        untaken_.push_back({completion.link, completion.slot(), std::move(completion.bytes())});
        take_messages();
        break;
      case Completion::Kind::kLinkDown:
        record.down.push_back({completion.link, *completion.error()});
        break;
    }
    if (on_completion) on_completion(completion);
  }
  bool take_messages() {
    bool any = false;
    for (; !untaken_.empty() && record.messages.size() < record.message_room; any = true) {
      Untaken message = std::move(untaken_.front());
      untaken_.pop_front();
      record.messages.emplace_back(message.link, std::move(message.bytes));
      domain().take(message.link, message.slot);
    }
    return any;
  }

  ManualControl control_;
  std::map<uint64_t, std::unique_ptr<Registration>> regions_;
  OpenedDomain opened_;
  std::deque<Untaken> untaken_;
  bool draining_ = false;
};

// Polls the domains until `done`, and sleeps on their descriptors while they have no work. The limit is far above all
// waits of these tests, so reaching it means a hang.
inline void run_until(const std::vector<Driven*>& domains, const std::function<bool()>& done,
                      const char* what = "condition") {
  const auto limit = std::chrono::steady_clock::now() + kLimit;
  while (!done()) {
    ASSERT_LT(std::chrono::steady_clock::now(), limit) << "still waiting for: " << what;
    bool busy = false;
    for (Driven* domain : domains) busy = domain->poll() || busy;
    if (busy || done()) continue;
    std::vector<pollfd> fds;
    for (Driven* domain : domains) {
      busy = !domain->prepare_sleep() || busy;
      for (const int fd : domain->fds()) fds.push_back({fd, POLLIN, 0});
    }
    // 20 ms: `done` may depend on something that no domain watches.
    if (!busy) ::poll(fds.data(), fds.size(), 20);
  }
}

// Polls until only work from outside remains. 40 turns, because a domain may look at its descriptors only in some of
// its turns (host: one in 16).
inline void run_idle(const std::vector<Driven*>& domains) {
  for (int quiet = 0; quiet < 40;) {
    bool busy = false;
    for (Driven* domain : domains) busy = domain->poll() || busy;
    quiet = busy ? 0 : quiet + 1;
  }
}

// Ends the link on this side, in as many turns as necessary.
inline void fence(Driven& domain, LinkId link) {
  run_until({&domain}, [&] { return domain.fence(link); }, "fence");
}

inline constexpr LinkId kLinkOfA = 11;
inline constexpr LinkId kLinkOfB = 22;

// The three steps of making a link. A offers.
inline void connect(Driven& a, Driven& b, LinkId link_a = kLinkOfA, LinkId link_b = kLinkOfB) {
  const Bytes offer = must(a.offer(link_a), "offer");
  const Bytes answer = must(b.accept(link_b, offer), "accept");
  must(a.complete(link_a, answer));
}

inline uint32_t immediate_of(size_t pages) { return Immediate{7, 3, static_cast<uint32_t>(pages)}.encode(); }

// Writes pages of one End's memory to pages of the other End's.
struct Batch {
  WorkId work = 1;
  uint64_t page_bytes = 4096;
  std::vector<uint64_t> from{};  // offsets in the source's memory
  std::vector<uint64_t> to{};    // offsets in the target's region
  bool counted = true;
  std::optional<uint64_t> rkey = std::nullopt;  // used in place of the target's key
};

// An End is a domain with one registered region: its `memory`, with the key `rkey`.
template <typename End>
Posted post(End& source, LinkId link, const End& target, const Batch& batch) {
  std::vector<PageWrite> pages;
  for (size_t i = 0; i < batch.to.size(); ++i) pages.push_back({source.memory.data() + batch.from[i], batch.to[i]});
  WriteBatch write;
  write.work = batch.work;
  write.rkey = batch.rkey.value_or(target.rkey);
  write.target_base = reinterpret_cast<uint64_t>(target.memory.data());
  write.page_bytes = batch.page_bytes;
  write.counted = batch.counted;
  write.immediate = immediate_of(pages.size());
  write.pages = pages;
  return source.domain->post(link, write);
}

}  // namespace kvc::test
