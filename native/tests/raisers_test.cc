// Ownership of counters: an immediate from a peer that did not receive it raises nothing and costs only that sender its
// link. Runs over each lane.

#include <vector>

#include "engine/imm_counter.h"
#include "tests/rig.h"

namespace kvc::test::raisers {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kPages = 32;

// A second peer of the receiver.
struct Other {
  Side side;
  Connection connection;
  RemoteRegionId receiver_region;

  Other(const std::string& name, const std::string& provider, Side& receiver, size_t domains = 1)
      : side(config(name, provider, domains), kPage * kPages),
        connection(connect(*side.engine, *receiver.engine)),
        receiver_region(must(side.engine->import_region(connection.first_to_second,
                                                        must(receiver.engine->region_descriptor(receiver.region))))) {
    fill_random(side.data(), kPage * kPages, 77);
  }
  PeerId at_receiver() const { return connection.second_to_first; }

  // Writes pages in memory order. It may end at any step or find no peer, because a foreign immediate costs the link.
  Result<TransferId> write_pages(size_t pages, uint32_t immediate) {
    PagedWrite write{kPage, side.region, {{}, kPage, 0}, receiver_region, {{}, kPage, 0}, immediate};
    for (size_t i = 0; i < pages; ++i) write.source_pages.indices.push_back(static_cast<int64_t>(i));
    write.target_pages.indices = write.source_pages.indices;
    const Result<TransferId> transfer = side.engine->open_transfer(connection.first_to_second);
    if (transfer && side.engine->write_pages(transfer.value(), std::move(write))) {
      static_cast<void>(side.engine->seal(transfer.value()));  // its end reports the outcome
    }
    return transfer;
  }
  TransferId raise(uint32_t immediate) {
    const PeerGroupId alone = must(side.engine->add_peer_group({connection.first_to_second}));
    return must(side.engine->barrier(alone, {immediate}));
  }
};

void expect_down(TransferEngine& engine, PeerId peer) {
  const Event event = next_event(engine);
  EXPECT_EQ(event.kind, EventKind::kPeerDown);
  EXPECT_EQ(event.id, peer);
}

// A write of the pair's sender. It lands, whether or not it is counted.
void write_page(Pair& pair, uint32_t immediate) {
  const TransferId transfer = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                 pair.receiver_region, 0, kPage, immediate));
  EXPECT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferDone);
}

class Raisers : public testing::TestWithParam<std::string> {
 protected:
  std::string provider() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Lanes, Raisers, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

TEST_P(Raisers, AForeignImmediateRaisesNothingAndCostsItsSenderTheLink) {
  for (const bool with_pages : {false, true}) {
    Pair pair(provider(), kPage * kPages);
    TransferEngine& receiver = *pair.receiver.engine;
    Other thief("thief", provider(), pair.receiver);
    const CounterSet set = must(receiver.alloc_counters(1, {pair.to_sender}));
    must(receiver.expect(set.id, {2}));
    write_page(pair, set.immediates[0]);
    const TransferId stolen =
        with_pages ? must(thief.write_pages(1, set.immediates[0])) : thief.raise(set.immediates[0]);
    const Event down = next_event(receiver);
    EXPECT_EQ(down.kind, EventKind::kPeerDown);
    EXPECT_EQ(down.id, thief.at_receiver());
    ASSERT_TRUE(down.error.has_value());
    EXPECT_EQ(down.error->code, ErrorCode::kRefused) << down.error->to_string();
    EXPECT_EQ(down.error->peer, "thief");
    EXPECT_EQ(receiver.stats().immediates_foreign, 1U);
    EXPECT_EQ(receiver.stats().immediates_stale, 0U);
    EXPECT_LE(pair.count(set.id), 1U) << "the foreign one was counted";
    ended(*thief.side.engine, stolen);  // with either outcome
    expect_down(*thief.side.engine, thief.connection.first_to_second);
    // Only the thief is affected.
    write_page(pair, set.immediates[0]);
    must(receiver.wait_counters(set.id, kLimit));
    EXPECT_EQ(pair.count(set.id), 2U);
    EXPECT_TRUE(receiver.poll_events(8).empty());
    EXPECT_TRUE(pair.sender.engine->poll_events(8).empty());
    // The thief may connect again, like any peer.
    must(receiver.fence(thief.at_receiver(), kLimit));
    must(thief.side.engine->fence(thief.connection.first_to_second, kLimit));
    const Connection again = connect(*thief.side.engine, receiver);
    EXPECT_EQ(ended(*thief.side.engine, must(thief.side.engine->send(again.first_to_second, Bytes(1)))).kind,
              EventKind::kTransferDone);
  }
}

// The thief may write these pages, but not raise the counter. No page is counted, whichever of them land.
TEST_P(Raisers, ManyForeignPagesRaiseNothing) {
  Pair pair(provider(), kPage * kPages);
  TransferEngine& receiver = *pair.receiver.engine;
  Other thief("thief", provider(), pair.receiver);
  const CounterSet set = must(receiver.alloc_counters(2, {pair.to_sender}));
  must(receiver.expect(set.id, {1, 1}));
  for (const uint32_t immediate : set.immediates) static_cast<void>(thief.write_pages(kPages, immediate));
  expect_down(receiver, thief.at_receiver());
  must(receiver.fence(thief.at_receiver(), kLimit));
  EXPECT_EQ(must(receiver.counter_values(set.id)), (std::vector<uint64_t>{0, 0}));
  EXPECT_GE(receiver.stats().immediates_foreign, 1U);
  EXPECT_TRUE(receiver.poll_events(8).empty());
}

// A thief with two links loses the link over which the immediate arrived. The settlement of that link raises nothing
// either.
TEST_P(Raisers, AForeignImmediateTakesOutTheLinkItCameOver) {
  Pair pair(provider(), kPage * kPages);
  TransferEngine& receiver = *pair.receiver.engine;
  const uint64_t before = receiver.stats().links;
  Other thief("thief", provider(), pair.receiver, 2);
  TransferEngine& thieves = *thief.side.engine;
  ended(thieves, must(thieves.write_one(thief.connection.first_to_second, thief.side.region, 0, thief.receiver_region,
                                        0, 1, std::nullopt)));
  // The other links are made once there was something to write.
  const size_t links = thieves.domains().size();
  await([&] { return thieves.stats().links == links && receiver.stats().links == before + links; }, "all links");
  const CounterSet set = must(receiver.alloc_counters(1, {pair.to_sender}));
  must(receiver.expect(set.id, {1}));
  const TransferId stolen = must(thief.write_pages(1, set.immediates[0]));
  await([&] { return receiver.stats().links_lost == 1; }, "the link's end");
  ended(thieves, stolen);
  await([&] { return receiver.stats().links_restored == 1; }, "the link");
  EXPECT_EQ(pair.count(set.id), 0U);
  EXPECT_EQ(receiver.stats().immediates_foreign, 1U);
  EXPECT_TRUE(receiver.poll_events(8).empty());
}

TEST_P(Raisers, EachOfSeveralMayRaiseAndNoOtherPeer) {
  Pair pair(provider(), kPage * kPages);
  TransferEngine& receiver = *pair.receiver.engine;
  Other second("second", provider(), pair.receiver);
  Other third("third", provider(), pair.receiver);
  Other stranger("stranger", provider(), pair.receiver);
  const CounterSet set = must(receiver.alloc_counters(1, {third.at_receiver(), pair.to_sender, second.at_receiver()}));
  must(receiver.expect(set.id, {2 * kPages + 1}));
  write_page(pair, set.immediates[0]);
  EXPECT_EQ(ended(*second.side.engine, must(second.write_pages(kPages, set.immediates[0]))).kind,
            EventKind::kTransferDone);
  must(stranger.write_pages(1, set.immediates[0]));
  expect_down(receiver, stranger.at_receiver());
  EXPECT_EQ(ended(*third.side.engine, must(third.write_pages(kPages, set.immediates[0]))).kind,
            EventKind::kTransferDone);
  must(receiver.wait_counters(set.id, kLimit));
  EXPECT_EQ(pair.count(set.id), 2 * kPages + 1);
  EXPECT_EQ(receiver.stats().immediates_foreign, 1U);
  EXPECT_TRUE(receiver.poll_events(8).empty());
}

TEST_P(Raisers, WithoutAnyNamedAllMayRaise) {
  Pair pair(provider(), kPage * kPages);
  TransferEngine& receiver = *pair.receiver.engine;
  Other other("other", provider(), pair.receiver);
  const auto [set, immediate] = pair.counter(kPages + 2);
  write_page(pair, immediate);
  EXPECT_EQ(ended(*other.side.engine, must(other.write_pages(kPages, immediate))).kind, EventKind::kTransferDone);
  EXPECT_EQ(ended(*other.side.engine, other.raise(immediate)).kind, EventKind::kTransferDone);
  must(receiver.wait_counters(set, kLimit));
  EXPECT_EQ(pair.count(set), kPages + 2);
  EXPECT_EQ(receiver.stats().immediates_foreign, 0U);
}

// Immediates that a set's raiser sends after its release are late. They cost no peer its link, also if the slot's next
// owner has other raisers.
TEST_P(Raisers, ALateImmediateOfARaiserIsNoForeignOne) {
  Pair pair(provider(), kPage * kPages);
  TransferEngine& receiver = *pair.receiver.engine;
  Other other("other", provider(), pair.receiver);
  const CounterSet released = must(receiver.alloc_counters(1, {pair.to_sender}));
  must(receiver.release_counters(released.id));
  const CounterSet next = must(receiver.alloc_counters(ImmCounterTable::kSlots, {other.at_receiver()}));
  write_page(pair, released.immediates[0]);
  await([&] { return receiver.stats().immediates_stale == 1; }, "the immediate");
  EXPECT_EQ(receiver.stats().immediates_foreign, 0U);
  for (const uint64_t value : must(receiver.counter_values(next.id))) EXPECT_EQ(value, 0U);
  EXPECT_TRUE(receiver.poll_events(8).empty());
}

}  // namespace
}  // namespace kvc::test::raisers
