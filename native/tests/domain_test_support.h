// What the tests of single providers share: a sink that records, batches, and domains driven by one thread.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "engine/domain.h"
#include "engine/immediate.h"
#include "tests/rig.h"

namespace kvc::test {

class RecordingSink final : public DomainSink {
 public:
  struct Down {
    LinkId link;
    Error error;
    bool fenced;
  };

  void on_complete(WorkId work, const Error* error) noexcept override {
    EXPECT_EQ(completed.count(work), 0U) << "work " << work << " completed twice";
    completed[work] = error == nullptr ? std::nullopt : std::optional(*error);
    order.push_back(work);
    if (on_completion) on_completion(work);
  }
  void on_immediate(LinkId link, uint32_t immediate) noexcept override {
    immediate_links.push_back(link);
    immediates.push_back(immediate);
    counted += Immediate::decode(immediate).multiplicity;
    if (on_arrival) on_arrival(immediate);
  }
  bool on_message(LinkId link, std::span<const std::byte> message) noexcept override {
    if (messages.size() >= message_room) return false;
    messages.push_back({link, Bytes(message.begin(), message.end())});
    return true;
  }
  void on_link_down(LinkId link, const Error& error, bool fenced) noexcept override {
    down.push_back({link, error, fenced});
    if (on_down) on_down(link);
  }

  bool succeeded(WorkId work) const { return completed.contains(work) && !completed.at(work).has_value(); }
  std::optional<ErrorCode> failure(WorkId work) const {
    return completed.contains(work) && completed.at(work) ? std::optional(completed.at(work)->code) : std::nullopt;
  }

  std::map<WorkId, std::optional<Error>> completed;
  std::vector<WorkId> order;
  std::vector<uint32_t> immediates;
  std::vector<LinkId> immediate_links;  // which link each came over
  std::vector<std::pair<LinkId, Bytes>> messages;
  size_t message_room = SIZE_MAX;  // refuses messages beyond it
  uint64_t counted = 0;
  std::vector<Down> down;
  std::function<void(WorkId)> on_completion;
  std::function<void(uint32_t)> on_arrival;
  std::function<void(LinkId)> on_down;
};

// Polls the domains until `done`, asleep on their descriptors while they have nothing to do. The limit is far above
// anything these tests wait for: reaching it is a hang.
inline void run_until(const std::vector<Domain*>& domains, const std::function<bool()>& done,
                      const char* what = "condition") {
  const auto limit = std::chrono::steady_clock::now() + kLimit;
  while (!done()) {
    ASSERT_LT(std::chrono::steady_clock::now(), limit) << "still waiting for: " << what;
    bool busy = false;
    for (Domain* domain : domains) busy = domain->poll() || busy;
    if (busy || done()) continue;
    std::vector<pollfd> fds;
    for (Domain* domain : domains) {
      busy = !domain->prepare_sleep() || busy;
      fds.push_back({domain->fd(), POLLIN, 0});
    }
    // 20 ms: `done` may wait for something that no domain watches.
    if (!busy) ::poll(fds.data(), fds.size(), 20);
  }
}

// Until nothing is left to do that does not come from outside. 40 turns: a domain may look at its descriptors in some
// of them only (host: one in 16).
inline void run_idle(const std::vector<Domain*>& domains) {
  for (int quiet = 0; quiet < 40;) {
    bool busy = false;
    for (Domain* domain : domains) busy = domain->poll() || busy;
    quiet = busy ? 0 : quiet + 1;
  }
}

inline constexpr LinkId kLinkOfA = 11;
inline constexpr LinkId kLinkOfB = 22;

// The three steps of a link: A offers.
inline void connect(Domain& a, Domain& b, LinkId link_a = kLinkOfA, LinkId link_b = kLinkOfB) {
  const Bytes offer = must(a.offer(link_a), "offer");
  const Bytes answer = must(b.accept(link_b, offer), "accept");
  must(a.complete(link_a, answer));
}

inline uint32_t immediate_of(size_t pages) { return Immediate{7, 3, static_cast<uint32_t>(pages)}.encode(); }

// Pages of one end's memory into pages of the other's.
struct Batch {
  WorkId work = 1;
  uint64_t page_bytes = 4096;
  std::vector<uint64_t> from{};  // offsets in the source's memory
  std::vector<uint64_t> to{};    // offsets in the target's region
  bool counted = true;
  std::optional<uint64_t> rkey = std::nullopt;  // another key than the target's
};

// An End is a domain with one registered region: its `memory`, whose key is `rkey`.
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
