// Helpers for tests of the scheduler alone, over domains that do exactly what the test requests.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/transfer_scheduler.h"

namespace kvc::test {

inline constexpr uint64_t kMiB = 1 << 20;

// Accepts all work, and completes nothing by itself.
class FakeDomain final : public Domain {
 public:
  struct Posting {
    LinkId link = 0;
    WorkId work = 0;
    uint64_t rkey = 0;
    uint64_t page_bytes = 0;
    std::vector<PageWrite> pages;
    std::optional<Immediate> immediate;
    Bytes message;
    bool over = false;  // completed
    uint64_t bytes() const { return page_bytes * pages.size(); }
  };
  std::vector<Posting> postings;
  bool busy = false;

  void publish(Registration&) override {}
  bool withdraw(Registration&) override { return true; }
  void attach(LinkId, std::unique_ptr<LinkEnd>) override {}
  bool fence(LinkId) override { return true; }
  Posted post(LinkId link, const WriteBatch& batch) override {
    if (busy) return Posted::kBusy;
    Posting posting{link, batch.work, batch.rkey, batch.page_bytes, {batch.pages.begin(), batch.pages.end()}, {}, {}};
    if (batch.counted) posting.immediate = Immediate::decode(batch.immediate);
    postings.push_back(std::move(posting));
    return Posted::kYes;
  }
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override {
    if (busy) return Posted::kBusy;
    postings.push_back({link, work, 0, 0, {}, {}, Bytes(message.begin(), message.end())});
    return Posted::kYes;
  }
  void take(LinkId, uint32_t) override {}
  bool poll() override { return false; }
  int fd() const override { return -1; }
  bool prepare_sleep() override { return true; }
};

inline const Error kBroken{ErrorCode::kPeerDown, "fake", {}, "write", "the cable is out"};
inline const Error kDenied{ErrorCode::kUnknownRegion, "fake", {}, "write", "no such key"};
inline constexpr uint32_t kCounter = Immediate{9, 3, 1}.encode();
inline constexpr uint32_t kOther = Immediate{10, 3, 1}.encode();

class Scheduler : public testing::Test {
 protected:
  // `first_generation`: see FlightTable.
  explicit Scheduler(uint32_t first_generation = 0) : scheduler(transfers, counters, events, stats, first_generation) {}
  // Connects a peer with this many links. Link i connects domains[i] with the remote domain i.
  void connect(size_t links) {
    peer = std::make_shared<Peer>(1, "peer");
    peer->state = Peer::State::kConnected;
    std::vector<uint64_t> rkeys;
    for (size_t i = 0; i < links; ++i) {
      domains.push_back(std::make_unique<FakeDomain>());
      Link& link = peer->links.emplace_back(domains[i].get(), nullptr, i, i, i);
      link.id = static_cast<LinkId>(i + 1);
      link.state = Link::State::kUp;
      rkeys.push_back(100 + i);
      lies_in->registrations.push_back(std::make_unique<Registration>(lies_in->range, i));
    }
    target = std::make_shared<const RemoteRegion>(1, 1, 0, 0, memory.size(), rkeys);
  }
  std::shared_ptr<Transfer> open() {
    auto transfer = std::make_shared<Transfer>(++last_id, peer, EventCallback{});
    transfers.insert(last_id, transfer);
    return transfer;
  }
  void write(Transfer& transfer, uint64_t bytes, std::optional<uint32_t> immediate = kCounter,
             std::optional<uint32_t> domain = {}) {
    scheduler.add(transfer, Request::make(source, target, bytes, immediate, SingleWrite{0, 0, domain}));
  }
  // Writes `pages` pages that are not contiguous on either side.
  void write_pages(Transfer& transfer, size_t pages, uint64_t page_bytes,
                   std::optional<uint32_t> immediate = kCounter) {
    PageTable table{{{}, 2 * page_bytes, 0}, {{}, 2 * page_bytes, 0}};
    for (size_t i = 0; i < pages; ++i) table.source.indices.push_back(static_cast<int64_t>(i));
    table.target.indices = table.source.indices;
    scheduler.add(transfer, Request::make(source, target, page_bytes, immediate,
                                          TableWrite{std::make_shared<const PageTable>(std::move(table)), 0, 0}));
  }
  void post_all() {
    while (scheduler.post()) {
    }
  }
  void post_and_settle() {
    do {
      post_all();
    } while (scheduler.settle());
  }
  // Completes the work in flight on link i. The error concerns the link.
  void complete(size_t i, const Error* error = nullptr) {
    for (FakeDomain::Posting& posting : domains[i]->postings) {
      if (!std::exchange(posting.over, true)) scheduler.complete(posting.work, error);
    }
    if (error != nullptr) peer->links[i].state = Link::State::kBroken;
    scheduler.settle();
  }
  // Completes all posted work and the work that follows from it, over all links that are up.
  void run() {
    for (int round = 0; round < 100; ++round) {
      post_and_settle();
      for (size_t i = 0; i < domains.size(); ++i) {
        if (peer->links[i].state == Link::State::kUp) complete(i);
      }
    }
  }
  Link& link(size_t i) { return peer->links[i]; }
  std::vector<FakeDomain::Posting>& postings(size_t i) { return domains[i]->postings; }
  std::vector<uint64_t> bytes_posted() const {
    std::vector<uint64_t> bytes;
    for (const auto& domain : domains) {
      bytes.push_back(0);
      for (const FakeDomain::Posting& posting : domain->postings) bytes.back() += posting.bytes();
    }
    return bytes;
  }
  // The sum by which all postings of link i raise the counter.
  uint64_t raised(size_t i, uint32_t counter = kCounter) const {
    uint64_t pages = 0;
    for (const FakeDomain::Posting& posting : domains[i]->postings) {
      if (posting.immediate && posting.immediate->slot == Immediate::decode(counter).slot) {
        pages += posting.immediate->multiplicity;
      }
    }
    return pages;
  }
  std::optional<Event> ended() {
    std::vector<Event> polled = events.poll(1);
    return polled.empty() ? std::nullopt : std::optional<Event>(std::move(polled[0]));
  }
  void expect_done(uint64_t pages) {
    const std::optional<Event> event = ended();
    ASSERT_TRUE(event.has_value()) << "no final event";
    EXPECT_EQ(event->kind, EventKind::kTransferDone) << (event->error ? event->error->to_string() : "");
    EXPECT_EQ(event->pages, pages);
    EXPECT_FALSE(ended().has_value()) << "a second event";
  }
  // Checks that no transfer has left anything.
  void expect_clean() {
    EXPECT_EQ(transfers.size(), 0U);
    EXPECT_EQ(lies_in->batches_in_flight, 0U);
    for (const Link& l : peer->links) {
      EXPECT_EQ(l.bytes_in_flight, 0U);
      EXPECT_EQ(l.messages_in_flight, 0U);
      EXPECT_TRUE(l.unsettled.empty());
    }
  }

  std::vector<std::byte> memory = std::vector<std::byte>(64 * kMiB);
  std::shared_ptr<LocalMemory> lies_in = std::make_shared<LocalMemory>(MemoryRange{memory.data(), memory.size()});
  std::shared_ptr<LocalRegion> source = std::make_shared<LocalRegion>(1, memory.data(), memory.size(), lies_in);
  std::shared_ptr<const RemoteRegion> target;
  WriterFirstMutex mutex;
  Registry<Transfer> transfers{mutex};
  CounterSets counters;
  EventQueue events;
  Stats stats;
  TransferScheduler scheduler;
  std::vector<std::unique_ptr<FakeDomain>> domains;
  std::shared_ptr<Peer> peer;
  TransferId last_id = 0;
};

}  // namespace kvc::test
