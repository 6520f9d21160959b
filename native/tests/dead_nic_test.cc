// One NIC of several has failed: the other NICs serve the existing peers and new ones. Runs over each lane.

#include <cstring>
#include <string>

#include "tests/nics.h"
#include "tests/rig.h"

namespace kvc::test::dead_nic {
namespace {

constexpr size_t kBytes = 1 << 20;

class DeadNic : public testing::TestWithParam<std::string> {
 protected:
  std::string provider() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Lanes, DeadNic, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

// `from` writes all of its memory over that of `to`, which is `peer`.
void expect_writable(Side& from, PeerId peer, Side& to, uint64_t seed) {
  fill_random(from.data(), kBytes, seed);
  const RemoteRegionId region = must(from.engine->import_region(peer, must(to.engine->region_descriptor(to.region))));
  const CounterSet set = must(to.engine->alloc_counters(1));
  must(to.engine->expect(set.id, {1}));
  const TransferId write = must(from.engine->write_one(peer, from.region, 0, region, 0, kBytes, set.immediates[0]));
  const Event done = ended(*from.engine, write);
  EXPECT_EQ(done.kind, EventKind::kTransferDone) << (done.error ? done.error->to_string() : "");
  must(to.engine->wait_counters(set.id, kLimit));
  EXPECT_EQ(std::memcmp(from.data(), to.data(), kBytes), 0);
}

void kill_all(Nics& nics, const TransferEngine& engine) {
  for (size_t i = 0; i < engine.domains().size(); ++i) nics[i].die();
}

template <typename T>
void expect_dead(const Result<T>& refused) {
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find(Nic::kDead), std::string::npos) << refused.error().to_string();
}

TEST_P(DeadNic, LeavesTheOthersToNewPeers) {
  for (const size_t others : {1, 3}) {
    Nics nics;
    Side side(nics.with(config("first", provider(), 3)), kBytes);
    Side other(config("second", provider(), others), kBytes);
    nics[0].die();
    const Connection offered = connect(*side.engine, *other.engine);
    expect_writable(side, offered.first_to_second, other, 1);
    expect_writable(other, offered.second_to_first, side, 2);
    // Each working NIC carries a link by now, so no link is the peer's last one.
    const size_t living = side.engine->domains().size() - 1;
    await([&] { return side.engine->stats().links == living && other.engine->stats().links == living; }, "their links");
    nics[1].die();
    Side another(config("third", provider(), others), kBytes);
    const Connection accepted = connect(*another.engine, *side.engine);
    expect_writable(another, accepted.first_to_second, side, 3);
    expect_writable(side, accepted.second_to_first, another, 4);
    // A peer that lost a link with the second NIC keeps its other links.
    expect_writable(other, offered.second_to_first, side, 5);
    EXPECT_TRUE(side.engine->poll_events(8).empty());
  }
}

// The NIC fails between the offer and its answer. That offer is lost, and the next one uses another NIC.
TEST_P(DeadNic, CostsTheOfferThatWasMadeOverIt) {
  Nics nics;
  Side side(nics.with(config("first", provider(), 2)), kBytes);
  Side other(config("second", provider(), 2), kBytes);
  const Handshake offer = must(side.engine->offer("second"));
  const Handshake answer = must(other.engine->accept("first", offer.bytes));
  nics[0].die();
  const Status completed = side.engine->complete(offer.peer, answer.bytes);
  expect_dead(completed);
  EXPECT_EQ(completed.error().peer, "second");
  EXPECT_EQ(side.engine->stats().peers, 0U);
  must(other.engine->fence(answer.peer, kLimit));
  const Connection again = connect(*side.engine, *other.engine);
  expect_writable(side, again.first_to_second, other, 1);
}

TEST_P(DeadNic, TheReasonIsReportedWhenAllNicsAreDead) {
  for (const bool fallback : {false, true}) {
    Nics nics;
    EngineConfig dead = nics.with(config("first", provider(), 2));
    dead.allow_fallback = fallback;
    Side side(std::move(dead), 4096);
    Side other(config("second", provider(), 2), 4096);
    const Handshake offer = must(other.engine->offer("first"));
    kill_all(nics, *side.engine);
    expect_dead(side.engine->offer("second"));
    expect_dead(side.engine->accept("second", offer.bytes));
    EXPECT_EQ(side.engine->stats().peers, 0U);
  }
}

// The lane fails with its only NIC. A transfer engine with fallback takes the next lane.
TEST_P(DeadNic, OfALaneOfItsOwnLeavesTheNextLane) {
  const std::string next = provider_of(provider()) == "sim" ? "tcp" : "sim";
  for (const bool fallback : {false, true}) {
    Nics nics;
    const auto both = [&](const char* name) {
      EngineConfig two = config(name, provider());
      two.domains.push_back(config(name, next).domains[0]);
      two.allow_fallback = fallback;
      return two;
    };
    Side side(nics.with(both("first")), kBytes);
    Side other(both("second"), kBytes);
    for (size_t i = 0; i + 1 < side.engine->domains().size(); ++i) nics[i].die();
    if (!fallback) {
      expect_dead(side.engine->offer("second"));
      continue;
    }
    const Connection offered = connect(*side.engine, *other.engine);
    EXPECT_EQ(must(side.engine->lane(offered.first_to_second)), next);
    expect_writable(side, offered.first_to_second, other, 1);
    const Handshake offer = must(other.engine->offer("first"));
    const Handshake answer = must(side.engine->accept("second", offer.bytes));
    must(other.engine->complete(offer.peer, answer.bytes));
    ASSERT_EQ(answer.passed_over.size(), 1U);
    EXPECT_NE(answer.passed_over[0].find(Nic::kDead), std::string::npos) << answer.passed_over[0];
    expect_writable(other, offer.peer, side, 2);
  }
}

}  // namespace
}  // namespace kvc::test::dead_nic
