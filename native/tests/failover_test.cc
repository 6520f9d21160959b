// Links that break and return, between two whole transfer engines over the sim fabric. At any moment of failure, every
// page arrives, every counter is exact, and every message arrives once. Nothing fails while one link is left.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "engine/message.h"
#include "providers/sim/faults.h"
#include "tests/rig.h"

namespace kvc::test::failover {
namespace {

// "s0", "s1", ... are the sender's NICs, "r0", ... the receiver's, in a fabric that only this test uses.
EngineConfig on_fabric(const std::string& name, const std::string& fabric, const std::string& nics, size_t count,
                       uint64_t seed) {
  EngineConfig config = test::config(name, "sim", count);
  for (size_t i = 0; i < count; ++i) {
    config.domains[i].fabric = fabric;
    config.domains[i].device = nics + std::to_string(i);
    config.domains[i].seed = seed * 100 + i;
    config.domains[i].max_delay_us = 200;
  }
  return config;
}

struct Rig {
  std::string fabric;
  sim::Faults faults;
  Pair pair;

  Rig(uint64_t seed, size_t sender_nics, size_t receiver_nics, size_t bytes)
      : fabric(next_name()),
        faults(fabric),
        pair(on_fabric("sender", fabric, "s", sender_nics, seed),
             on_fabric("receiver", fabric, "r", receiver_nics, seed), bytes) {
    pair.make_links();
  }
  static std::string next_name() {
    static std::atomic<int> count{0};
    return "failover-" + std::to_string(++count);
  }
  TransferEngine& sender() { return *pair.sender.engine; }
  TransferEngine& receiver() { return *pair.receiver.engine; }
};

constexpr size_t kPage = 512;

// The traffic in one direction: paged writes with counters, split single writes, immediates that transfers share.
struct Traffic {
  TransferEngine& from;
  Side& source;
  TransferEngine& to;
  Side& target;
  PeerId peer;
  RemoteRegionId region;
  std::vector<TransferId> transfers;
  std::vector<std::pair<CounterSetId, uint64_t>> targets;  // the one counter of each set, and its expected value
  std::vector<std::byte> expected;

  Traffic(TransferEngine& sending, Side& from_side, TransferEngine& receiving, Side& to_side, PeerId to_peer,
          RemoteRegionId to_region)
      : from(sending),
        source(from_side),
        to(receiving),
        target(to_side),
        peer(to_peer),
        region(to_region),
        expected(to_side.data(), to_side.data() + to_side.memory.size()) {}

  uint32_t counter(uint64_t pages) {
    CounterSet set = must(to.alloc_counters(1));
    must(to.expect(set.id, {pages}));
    targets.emplace_back(set.id, pages);
    return set.immediates[0];
  }
  void pages(std::mt19937_64& random, size_t first, size_t count) {
    PagedWrite write;
    write.page_bytes = kPage;
    write.source = source.region;
    write.target = region;
    // Half of them are in order, so that pages are coalesced too.
    std::vector<int64_t> order = shuffled(count, count, random());
    if (random() % 2 == 0) std::sort(order.begin(), order.end());
    for (int64_t& page : order) page += static_cast<int64_t>(first);
    write.source_pages = {order, kPage, 0};
    write.target_pages = {order, kPage, 0};
    write.immediate = counter(count);
    std::memcpy(expected.data() + first * kPage, source.data() + first * kPage, count * kPage);
    const TransferId transfer = must(from.open_transfer(peer));
    must(from.write_pages(transfer, write));
    must(from.seal(transfer));
    transfers.push_back(transfer);
  }
  void single(size_t offset, size_t bytes, uint32_t immediate) {
    std::memcpy(expected.data() + offset, source.data() + offset, bytes);
    transfers.push_back(must(from.write_one(peer, source.region, offset, region, offset, bytes, immediate)));
  }
  void verify() {
    for (const TransferId transfer : transfers) {
      const Event event = ended(from, transfer);
      ASSERT_EQ(event.kind, EventKind::kTransferDone) << (event.error ? event.error->to_string() : "");
    }
    for (const auto& [set, pages] : targets) {
      must(to.wait_counters(set, kLimit));
      ASSERT_EQ(must(to.counter_values(set))[0], pages);
    }
    ASSERT_EQ(std::memcmp(target.data(), expected.data(), expected.size()), 0);
  }
};

struct Shape {
  size_t sender_nics;
  size_t receiver_nics;
};

class AnyMoment : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, AnyMoment, testing::Range(1, 41));

// NICs are cut at random pages and return at any time. At least one link is up.
TEST_P(AnyMoment, NothingIsLostAndEveryCountIsExact) {
  const auto seed = static_cast<uint64_t>(GetParam());
  std::mt19937_64 random(seed);
  const Shape shape = std::vector<Shape>{{2, 2}, {3, 2}, {2, 4}, {4, 4}}[random() % 4];
  constexpr size_t kBytes = 6 << 20;
  Rig rig(seed, shape.sender_nics, shape.receiver_nics, kBytes);
  Pair& pair = rig.pair;
  fill_random(pair.sender.data(), kBytes, seed);
  fill_random(pair.receiver.data(), kBytes / 2, seed + 1);

  // Candidates for cuts while links are left: all NICs of one side but the last.
  const bool senders = random() % 2 == 0;
  const std::string side = senders ? "s" : "r";
  const size_t nics = senders ? shape.sender_nics : shape.receiver_nics;
  const size_t first_victim = random() % (nics - 1);
  rig.faults.cut_after(side + std::to_string(first_victim), 1 + static_cast<int64_t>(random() % 200));
  if (const size_t second = random() % (nics - 1); second != first_victim) {
    rig.faults.cut_after(side + std::to_string(second), 1 + static_cast<int64_t>(random() % 2000));
  }

  Traffic there(rig.sender(), pair.sender, rig.receiver(), pair.receiver, pair.to_receiver, pair.receiver_region);
  const size_t half = kBytes / 2;  // the sender writes from here on; the receiver's own bytes are before it
  const size_t paged = (half + (1 << 20)) / kPage;
  size_t first = half / kPage;
  while (first < paged) {
    const size_t count = std::min<size_t>(1 + random() % 300, paged - first);
    there.pages(random, first, count);
    first += count;
  }
  there.single(first * kPage, (1 << 20) + 1234, there.counter(1));
  const uint32_t shared = there.counter(40);
  for (size_t i = 0; i < 40; ++i) there.single((first * kPage) + (1 << 20) + 4096 + i * 100, 100, shared);

  // The opposite direction, over the same links.
  Traffic back(rig.receiver(), pair.receiver, rig.sender(), pair.sender, pair.to_sender, pair.sender_region);
  for (size_t at = 0; at < 1500; at += 250) back.pages(random, at, 250);

  there.verify();
  back.verify();
  await([&] { return rig.sender().stats().links_lost >= 1 && rig.receiver().stats().links_lost >= 1; }, "lost links");
  for (size_t i = 0; i + 1 < nics; ++i) rig.faults.restore(side + std::to_string(i));
  // The traffic continues, whichever links have returned by now.
  there.transfers.clear();
  there.targets.clear();
  for (int i = 0; i < 4; ++i) there.pages(random, half / kPage + static_cast<size_t>(i) * 100, 100);
  there.verify();
  EXPECT_EQ(rig.sender().stats().transfers_open, 0U);
  EXPECT_EQ(rig.receiver().stats().immediates_stale, 0U);
  EXPECT_TRUE(rig.sender().poll_events(8).empty());
  EXPECT_TRUE(rig.receiver().poll_events(8).empty());
}

// --- Over every lane: a write with a wrong key ends its link if the fabric works like that (a queue pair in error
// state, a tcp connection).

class OverEveryLane : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Lanes, OverEveryLane, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

TEST_P(OverEveryLane, AWrongKeyCostsTheOtherTransfersNothing) {
  constexpr size_t kBytes = 8 << 20;
  Pair pair(GetParam(), kBytes, 2, 2);
  TransferEngine& sender = *pair.sender.engine;
  pair.make_links();
  fill_random(pair.sender.data(), kBytes, 6);
  Bytes descriptor = must(pair.receiver.engine->region_descriptor(pair.receiver.region));
  descriptor.back() ^= std::byte{0xFF};  // the last byte belongs to the second domain's key
  const RemoteRegionId wrong = must(sender.import_region(pair.to_receiver, descriptor));
  Traffic there(sender, pair.sender, *pair.receiver.engine, pair.receiver, pair.to_receiver, pair.receiver_region);
  std::mt19937_64 random(7);
  TransferId refused = 0;
  for (size_t i = 0; i < 32; ++i) {
    there.pages(random, i * 500, 500);
    if (i == 10) {
      refused = must(sender.write_one(pair.to_receiver, pair.sender.region, 0, wrong, 0, 64, std::nullopt, {}, 1));
    }
  }
  EXPECT_EQ(ended(sender, refused).kind, EventKind::kTransferFailed);
  there.verify();
  // If the write ended the link, the link returns.
  await(
      [&] {
        const EngineStats ours = sender.stats();
        const EngineStats theirs = pair.receiver.engine->stats();
        return ours.links_lost == ours.links_restored && theirs.links_lost == theirs.links_restored;
      },
      "the link");
  there.transfers.clear();
  there.targets.clear();
  there.pages(random, 0, 1000);
  there.verify();
  EXPECT_TRUE(sender.poll_events(8).empty());
}

// A write that races a deregistration fails, without any other effect: the peer is not lost over any lane, whatever its
// number of links. A queue pair ends with the first write that it refuses. Over verbs, each link that carries such a
// write is lost, and no more writes are posted to such a region.
TEST_P(OverEveryLane, AWriteToARegionThatIsGoneCostsNoPeer) {
  const bool refusal_ends_link = provider_of(GetParam()) == "verbs";
  for (const size_t nics : {1, 2, 4}) {
    if (refusal_ends_link && nics == 1) continue;
    constexpr size_t kBytes = 1 << 20;
    constexpr size_t kHalf = kBytes / 2;
    Pair pair(GetParam(), kBytes, nics, nics);
    TransferEngine& sender = *pair.sender.engine;
    TransferEngine& receiver = *pair.receiver.engine;
    pair.make_links();
    // Separate memory, which is not registered with the other transfer engine.
    const SharedMemory goes = must(SharedMemory::create("kvc-test-goes", kBytes));
    const RegionId local = must(receiver.register_memory(goes.data(), kBytes, goes.fd(), 0));
    const RemoteRegionId region = must(sender.import_region(pair.to_receiver, must(receiver.region_descriptor(local))));
    const auto write = [&](RemoteRegionId to, size_t at) {
      return must(sender.write_one(pair.to_receiver, pair.sender.region, at, to, at, 4096, std::nullopt));
    };
    EXPECT_EQ(ended(sender, write(region, 0)).kind, EventKind::kTransferDone);
    must(receiver.deregister_memory(local, kLimit));
    if (refusal_ends_link) {
      EXPECT_EQ(ended(sender, write(region, 0)).error.value().code, ErrorCode::kUnknownRegion);
    }
    const TransferId transfer = must(sender.open_transfer(pair.to_receiver));
    // The failure of the first write may end the transfer before the last one is submitted. The last one is then
    // refused.
    const auto submitted_or_ended = [&](const Status& status) {
      EXPECT_TRUE(status.ok() || status.error().code == ErrorCode::kInvalidArgument) << status.error().to_string();
    };
    for (size_t i = 0; i < 8; ++i) {
      submitted_or_ended(sender.write(transfer, pair.sender.region, i * 4096, region, i * 4096, 4096, std::nullopt));
    }
    submitted_or_ended(sender.seal(transfer));
    const TransferId beside = write(region, kHalf);
    for (const TransferId refused : {transfer, beside}) {
      const Event event = ended(sender, refused);
      EXPECT_EQ(event.kind, EventKind::kTransferFailed);
      EXPECT_EQ(event.error->code, ErrorCode::kUnknownRegion) << event.error->to_string();
    }
    const Event event = ended(sender, write(pair.receiver_region, 0));
    EXPECT_EQ(event.kind, EventKind::kTransferDone) << nics << (event.error ? event.error->to_string() : "");
    EXPECT_TRUE(sender.poll_events(8).empty());
    EXPECT_TRUE(receiver.poll_events(8).empty());
    EXPECT_EQ(sender.stats().links_lost, refusal_ends_link ? 1U : 0U);
  }
}

// --- Single events

TEST(Failover, ALinkThatIsRestoredComesBackAndCarriesTraffic) {
  Rig rig(1, 2, 2, 1 << 20);
  Pair& pair = rig.pair;
  for (int round = 1; round <= 2; ++round) {
    rig.faults.cut("s0");
    const auto lost = [&](TransferEngine& engine) { return engine.stats().links_lost; };
    await(
        [&] {
          return lost(rig.sender()) == static_cast<uint64_t>(round) && lost(rig.receiver()) == lost(rig.sender());
        },
        "the cut");
    std::vector<LostLink> links = must(rig.sender().lost_links());
    ASSERT_EQ(links.size(), 1U);
    EXPECT_EQ(links[0].peer, pair.to_receiver);
    EXPECT_EQ(links[0].links, 2U);
    EXPECT_EQ(links[0].times_lost, static_cast<uint64_t>(round));
    EXPECT_FALSE(links[0].up);
    EXPECT_FALSE(links[0].reason.to_string().empty());
    rig.faults.restore("s0");
    const auto restored = [&](TransferEngine& engine) { return engine.stats().links_restored; };
    await(
        [&] {
          return restored(rig.sender()) == static_cast<uint64_t>(round) &&
                 restored(rig.receiver()) == restored(rig.sender());
        },
        "the link");
    links = must(rig.sender().lost_links());
    ASSERT_EQ(links.size(), 1U);
    EXPECT_TRUE(links[0].up);
  }
  // Only this link is left now.
  rig.faults.cut("s1");
  await([&] { return rig.sender().stats().links_lost == 3; }, "the other cut");
  Traffic there(rig.sender(), pair.sender, rig.receiver(), pair.receiver, pair.to_receiver, pair.receiver_region);
  fill_random(pair.sender.data(), 1 << 20, 3);
  std::mt19937_64 random(4);
  there.pages(random, 0, 1000);
  there.verify();
}

TEST(Failover, WithItsLastLinkThePeerIsDown) {
  Rig rig(2, 2, 1, 1 << 20);
  Pair& pair = rig.pair;
  const TransferId transfer = must(rig.sender().open_transfer(pair.to_receiver));
  rig.faults.cut("s1");
  await([&] { return rig.sender().stats().links_lost == 1; }, "the first cut");
  rig.faults.cut("s0");
  const Event event = ended(rig.sender(), transfer);
  EXPECT_EQ(event.kind, EventKind::kTransferFailed);
  EXPECT_EQ(event.error->code, ErrorCode::kPeerDown);
  bool down = false;
  await(
      [&] {
        for (const Event& other : rig.sender().poll_events(8)) down |= other.kind == EventKind::kPeerDown;
        return down;
      },
      "the peer's end");
  must(rig.sender().fence(pair.to_receiver, kLimit));
  must(rig.receiver().fence(pair.to_sender, kLimit));
  EXPECT_EQ(rig.sender().stats().peers, 0U);
}

TEST(Failover, APeerCanBeFencedAndLeftWhileALinkIsOut) {
  for (const bool in_order : {false, true}) {
    Rig rig(3, 2, 2, 1 << 20);
    rig.faults.cut("r1");
    await([&] { return rig.sender().stats().links_lost == 1 && rig.receiver().stats().links_lost == 1; }, "the cut");
    if (in_order) {
      must(rig.sender().disconnect(rig.pair.to_receiver, kLimit));
    } else {
      must(rig.sender().fence(rig.pair.to_receiver, kLimit));
      must(rig.receiver().fence(rig.pair.to_sender, kLimit));
    }
    await([&] { return rig.sender().stats().peers + rig.receiver().stats().peers == 0; }, "both ends");
  }
}

TEST(Failover, ACancelledTransferDrainsWhileALinkIsOut) {
  Rig rig(4, 2, 2, 4 << 20);
  Pair& pair = rig.pair;
  rig.faults.cut_after("s0", 100);
  const TransferId transfer = must(rig.sender().open_transfer(pair.to_receiver));
  PagedWrite write;
  write.page_bytes = 64;
  write.source = pair.sender.region;
  write.target = pair.receiver_region;
  const std::vector<int64_t> order = shuffled(32768, 32768, 5);
  write.source_pages = {order, 128, 0};
  write.target_pages = {order, 128, 0};
  must(rig.sender().write_pages(transfer, write));
  await([&] { return rig.sender().stats().links_lost == 1; }, "the cut");
  if (const Status status = rig.sender().cancel(transfer); status.ok()) {
    const Event event = ended(rig.sender(), transfer);
    EXPECT_EQ(event.kind, EventKind::kTransferCancelled);
    EXPECT_TRUE(event.quiesced);
  } else {
    ADD_FAILURE() << status.error().to_string();
  }
}

TEST(Failover, MessagesArriveOnceEach) {
  constexpr uint32_t kMessages = 400;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    Rig rig(seed, 2, 2, 4096);
    std::vector<TransferId> sent;
    std::vector<int> times(kMessages);
    uint32_t received = 0;
    const auto receive = [&] {
      for (const Message& message : rig.receiver().receive(64)) {
        uint32_t number = 0;
        ASSERT_EQ(message.bytes.size(), sizeof(number));
        std::memcpy(&number, message.bytes.data(), sizeof(number));
        ++times.at(number);
        ++received;
      }
    };
    for (uint32_t i = 0; i < kMessages; ++i) {
      if (i == 100) rig.faults.cut("s0");
      if (i == 200) rig.faults.restore("s0");
      if (i == 300) rig.faults.cut("r1");
      std::array<std::byte, sizeof(i)> bytes;
      std::memcpy(bytes.data(), &i, sizeof(i));
      Result<TransferId> transfer = rig.sender().send(rig.pair.to_receiver, bytes);
      while (!transfer.ok() && transfer.error().code == ErrorCode::kResources) {  // too many messages that are not read
        receive();
        std::this_thread::yield();
        transfer = rig.sender().send(rig.pair.to_receiver, bytes);
      }
      sent.push_back(must(std::move(transfer)));
      // The link must return before the next one is cut.
      if (i == 299)
        await(
            [&] {
              receive();
              return rig.sender().stats().links_restored == 1;
            },
            "the link");
    }
    await(
        [&] {
          receive();
          return received >= kMessages;
        },
        "the messages");
    for (const TransferId transfer : sent) EXPECT_EQ(ended(rig.sender(), transfer).kind, EventKind::kTransferDone);
    receive();
    EXPECT_EQ(received, kMessages);
    EXPECT_TRUE(std::all_of(times.begin(), times.end(), [](int n) { return n == 1; }));
  }
}

TEST(Failover, TheOnlyLinkOfAPeerIsThePeer) {
  Rig rig(5, 1, 1, 4096);
  rig.faults.cut("s0");
  bool down = false;
  await(
      [&] {
        for (const Event& other : rig.sender().poll_events(8)) down |= other.kind == EventKind::kPeerDown;
        return down;
      },
      "the peer's end");
  EXPECT_EQ(rig.sender().stats().links_lost, 0U);
}

}  // namespace
}  // namespace kvc::test::failover
