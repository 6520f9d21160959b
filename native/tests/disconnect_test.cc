// Graceful disconnects, over each provider: open work ends first, neither side sees an error, and no resource is left.

#include <atomic>
#include <future>
#include <thread>

#include "tests/rig.h"

namespace kvc::test {
namespace {

void expect_left(TransferEngine& engine, PeerId peer) {
  const Event left = next_event(engine);
  EXPECT_EQ(left.kind, EventKind::kPeerLeft) << (left.error ? left.error->to_string() : "");
  EXPECT_EQ(left.id, peer);
  EXPECT_FALSE(left.error.has_value());
  EXPECT_TRUE(engine.poll_events(10).empty());
  EXPECT_EQ(engine.stats().peers, 0U);
  EXPECT_EQ(engine.lane(peer).error().code, ErrorCode::kUnknownPeer);
}

class Disconnect : public testing::TestWithParam<std::string> {
 protected:
  std::string provider() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Lanes, Disconnect, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

TEST_P(Disconnect, AnIdlePeerLeavesWithoutAnError) {
  for (const size_t domains : {1, 3}) {
    for (const bool offerer_leaves : {true, false}) {
      Pair pair(provider(), 4096, domains, 1);
      TransferEngine& leaver = offerer_leaves ? *pair.sender.engine : *pair.receiver.engine;
      TransferEngine& other = offerer_leaves ? *pair.receiver.engine : *pair.sender.engine;
      must(leaver.disconnect(offerer_leaves ? pair.to_receiver : pair.to_sender, kLimit));
      EXPECT_EQ(leaver.stats().peers, 0U);
      EXPECT_TRUE(leaver.poll_events(10).empty());
      expect_left(other, offerer_leaves ? pair.to_sender : pair.to_receiver);
      // The two can connect again.
      const Connection again = connect(leaver, other);
      EXPECT_EQ(ended(leaver, must(leaver.send(again.first_to_second, Bytes(1)))).kind, EventKind::kTransferDone);
    }
  }
}

TEST_P(Disconnect, WaitsForWhatIsOpenOnBothSides) {
  constexpr uint64_t kBytes = 8 << 20;
  Pair pair(provider(), kBytes);
  fill_random(pair.sender.data(), kBytes, 1);
  const auto [there, to_there] = pair.counter(1);
  const TransferId ours = must(pair.sender.engine->open_transfer(pair.to_receiver));
  const TransferId theirs = must(pair.receiver.engine->open_transfer(pair.to_sender));
  // A call without time begins it.
  EXPECT_EQ(pair.sender.engine->disconnect(pair.to_receiver, Timeout(0)).error().code, ErrorCode::kTimeout);
  const Result<TransferId> opened = pair.sender.engine->open_transfer(pair.to_receiver);

  // New transfers are refused. The open one takes more writes and ends normally.
  EXPECT_EQ(opened.error().code, ErrorCode::kPeerDown);
  EXPECT_EQ(pair.sender.engine->send(pair.to_receiver, Bytes(1)).error().code, ErrorCode::kPeerDown);
  must(pair.sender.engine->write(ours, pair.sender.region, 0, pair.receiver_region, 0, kBytes, to_there));
  must(pair.sender.engine->seal(ours));
  EXPECT_EQ(ended(*pair.sender.engine, ours).kind, EventKind::kTransferDone);
  must(pair.receiver.engine->wait_counters(there, kLimit));
  EXPECT_EQ(pair.sender.engine->disconnect(pair.to_receiver, Timeout(20'000)).error().code, ErrorCode::kTimeout);

  const auto here = must(pair.sender.engine->alloc_counters(1));
  must(pair.sender.engine->expect(here.id, {1}));
  must(pair.receiver.engine->write(theirs, pair.receiver.region, 0, pair.sender_region, 0, kBytes, here.immediates[0]));
  must(pair.receiver.engine->seal(theirs));
  must(pair.sender.engine->disconnect(pair.to_receiver, kLimit));
  EXPECT_EQ(must(pair.sender.engine->counter_values(here.id))[0], 1U);  // it had arrived before the disconnect
  EXPECT_EQ(ended(*pair.receiver.engine, theirs).kind, EventKind::kTransferDone);
  expect_left(*pair.receiver.engine, pair.to_sender);
}

TEST_P(Disconnect, MessagesOnTheWayArriveFirst) {
  Pair pair(provider(), 4096);
  constexpr size_t kCount = 100;  // more than the receiver holds unread
  for (size_t i = 0; i < kCount; ++i) must(pair.sender.engine->send(pair.to_receiver, Bytes(100), [](const Event&) {}));
  auto parted =
      std::async(std::launch::async, [&] { return pair.sender.engine->disconnect(pair.to_receiver, kLimit); });
  for (size_t i = 0; i < kCount; ++i) must(pair.receiver.engine->wait_message(kLimit));
  must(parted.get());
  expect_left(*pair.receiver.engine, pair.to_sender);
}

TEST_P(Disconnect, BothAtOnce) {
  for (int round = 0; round < 5; ++round) {
    Pair pair(provider(), 4096, 2, 2);
    auto theirs =
        std::async(std::launch::async, [&] { return pair.receiver.engine->disconnect(pair.to_sender, kLimit); });
    const Status ours = pair.sender.engine->disconnect(pair.to_receiver, kLimit);
    // The later caller may find that the disconnect has finished.
    for (const Status& status : {ours, theirs.get()}) {
      EXPECT_TRUE(status.ok() || status.error().code == ErrorCode::kUnknownPeer) << status.error().to_string();
    }
    for (TransferEngine* engine : {pair.sender.engine.get(), pair.receiver.engine.get()}) {
      EXPECT_EQ(engine->stats().peers, 0U);
      for (const Event& event : engine->poll_events(10)) EXPECT_EQ(event.kind, EventKind::kPeerLeft);
    }
  }
}

TEST_P(Disconnect, APeerThatDiesMeanwhileIsAnErrorAfterAll) {
  Pair pair(provider(), 4096);
  const TransferId theirs = must(pair.receiver.engine->open_transfer(pair.to_sender));
  EXPECT_EQ(pair.sender.engine->disconnect(pair.to_receiver, Timeout(1'000)).error().code, ErrorCode::kTimeout);
  pair.receiver.engine.reset();
  const Status status = pair.sender.engine->disconnect(pair.to_receiver, kLimit);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kPeerDown);
  EXPECT_EQ(next_event(*pair.sender.engine).kind, EventKind::kPeerDown);
  must(pair.sender.engine->fence(pair.to_receiver, kLimit));
  (void)theirs;
}

TEST_P(Disconnect, FenceCutsItShort) {
  Pair pair(provider(), 4096);
  const TransferId ours = must(pair.sender.engine->open_transfer(pair.to_receiver));
  EXPECT_EQ(pair.sender.engine->disconnect(pair.to_receiver, Timeout(1'000)).error().code, ErrorCode::kTimeout);
  must(pair.sender.engine->fence(pair.to_receiver, kLimit));
  EXPECT_EQ(ended(*pair.sender.engine, ours).kind, EventKind::kTransferFailed);
  EXPECT_EQ(pair.sender.engine->disconnect(pair.to_receiver, kLimit).error().code, ErrorCode::kUnknownPeer);
  EXPECT_EQ(next_event(*pair.receiver.engine).kind, EventKind::kPeerDown);
}

TEST_P(Disconnect, AnOfferCannotLeave) {
  Side side(config("engine", provider()), 4096);
  const Handshake offered = must(side.engine->offer("nobody"));
  EXPECT_EQ(side.engine->disconnect(offered.peer, kLimit).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(side.engine->disconnect(4711, kLimit).error().code, ErrorCode::kUnknownPeer);
}

TEST_P(Disconnect, OfTheAcceptorBeforeTheOffererHasItsAnswer) {
  Side first(config("first", provider()), 4096);
  Side second(config("second", provider()), 4096);
  const Handshake offer = must(first.engine->offer("second"));
  const Handshake answer = must(second.engine->accept("first", offer.bytes));
  auto parted = std::async(std::launch::async, [&] { return second.engine->disconnect(answer.peer, kLimit); });
  must(first.engine->complete(offer.peer, answer.bytes));
  must(parted.get());
  expect_left(*first.engine, offer.peer);
}

TEST_P(Disconnect, LeavesNothingBehind) {
  Side first(config("first", provider()), 4096);
  Side second(config("second", provider()), 4096);
  for (int round = 0; round < 20; ++round) {
    const Connection connection = connect(*first.engine, *second.engine);
    const RemoteRegionId region = must(
        first.engine->import_region(connection.first_to_second, must(second.engine->region_descriptor(second.region))));
    EXPECT_EQ(ended(*first.engine,
                    must(first.engine->write_one(connection.first_to_second, first.region, 0, region, 0, 100, {})))
                  .kind,
              EventKind::kTransferDone);
    must(first.engine->disconnect(connection.first_to_second, kLimit));
    expect_left(*second.engine, connection.second_to_first);
    // Its region was forgotten with it.
    const Connection next = connect(*first.engine, *second.engine);
    EXPECT_EQ(first.engine->write_one(next.first_to_second, first.region, 0, region, 0, 100, {}).error().code,
              ErrorCode::kUnknownRegion);
    must(second.engine->disconnect(next.second_to_first, kLimit));
    expect_left(*first.engine, next.first_to_second);
  }
  EXPECT_EQ(first.engine->stats().transfers_open, 0U);
  EXPECT_EQ(second.engine->stats().transfers_open, 0U);
}

// The acceptor sends its goodbye before the offerer knows that it is connected.
TEST_P(Disconnect, AtOnceReachesThePeer) {
  Side first(config("first", provider()), 4096);
  Side second(config("second", provider()), 4096);
  const Handshake offer = must(first.engine->offer("second"));
  const Handshake answer = must(second.engine->accept("first", offer.bytes));
  auto parted = std::async(std::launch::async, [&] { return second.engine->disconnect(answer.peer, kLimit); });
  must(first.engine->complete(offer.peer, answer.bytes));
  must(parted.get());
  expect_left(*first.engine, offer.peer);
}

}  // namespace
}  // namespace kvc::test
