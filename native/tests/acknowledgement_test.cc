// A receiver may leave as soon as it has what it waited for. What it has counted or taken is acknowledged before its
// links end, so that its sender does not see a failure. Runs over each lane, and for each way to leave.

#include <string>
#include <tuple>
#include <vector>

#include "tests/rig.h"
#include "tests/scheduler_test_support.h"

namespace kvc::test::acknowledgement {
namespace {

// A round of messages takes up to 0.2 s over libfabric, and each sanitizer runs 36 of these tests.
constexpr size_t kRounds = 25;
constexpr size_t kPage = 4096;
constexpr size_t kPages = 40;

// The lane, and the receiver's action.
using Param = std::tuple<std::string, std::string>;

class Acknowledgement : public testing::TestWithParam<Param> {
 protected:
  struct Peers {
    Side receiver;
    Connection connection;
    RemoteRegionId region;
  };

  std::string provider() const { return std::get<0>(GetParam()); }
  // Each round has a new receiver.
  Peers meet(size_t domains = 1) {
    Side receiver(config("receiver", provider(), domains), kPage * kPages);
    const Connection connection = connect(*sender.engine, *receiver.engine);
    const RemoteRegionId region = must(sender.engine->import_region(
        connection.first_to_second, must(receiver.engine->region_descriptor(receiver.region))));
    return {std::move(receiver), connection, region};
  }
  void leave(Peers& peers) {
    const std::string& way = std::get<1>(GetParam());
    TransferEngine& receiver = *peers.receiver.engine;
    if (way == "Fence") return must(receiver.fence(peers.connection.second_to_first, kLimit));
    if (way == "Disconnect") must(receiver.disconnect(peers.connection.second_to_first, kLimit));
    peers.receiver.engine.reset();
  }
  void expect_done(TransferId transfer, size_t round) {
    const Event event = ended(*sender.engine, transfer);
    EXPECT_EQ(event.kind, EventKind::kTransferDone)
        << "round " << round << ": " << (event.error ? event.error->to_string() : "");
  }
  // Fences the peer on the sender's side, so that no peer is left for the next round.
  void forget(const Peers& peers) {
    const Status fenced = sender.engine->fence(peers.connection.first_to_second, kLimit);
    EXPECT_TRUE(fenced.ok() || fenced.error().code == ErrorCode::kUnknownPeer);  // it disconnected gracefully
  }

  Side sender{config("sender", provider()), kPage * kPages};
};
INSTANTIATE_TEST_SUITE_P(Lanes, Acknowledgement,
                         testing::Combine(testing::ValuesIn(providers()),
                                          testing::Values("Close", "Fence", "Disconnect")),
                         [](const auto& info) {
                           return label(std::get<0>(info.param)) + "_" + std::get<1>(info.param);
                         });

TEST_P(Acknowledgement, OfPagesThatWereCounted) {
  for (size_t round = 0; round < kRounds; ++round) {
    Peers peers = meet();
    TransferEngine& receiver = *peers.receiver.engine;
    const CounterSet set = must(receiver.alloc_counters(1, {peers.connection.second_to_first}));
    must(receiver.expect(set.id, {kPages}));
    PagedWrite write{kPage, sender.region, {}, peers.region, {}, set.immediates[0]};
    write.source_pages = {shuffled(kPages, kPages, round), kPage, 0};
    write.target_pages = write.source_pages;
    const TransferId transfer = must(sender.engine->open_transfer(peers.connection.first_to_second));
    must(sender.engine->write_pages(transfer, write));
    must(sender.engine->seal(transfer));
    must(receiver.wait_counters(set.id, kLimit));
    leave(peers);
    expect_done(transfer, round);
    forget(peers);
  }
}

TEST_P(Acknowledgement, OfAMessageThatWasTaken) {
  for (size_t round = 0; round < kRounds; ++round) {
    Peers peers = meet();
    const TransferId sent = must(sender.engine->send(peers.connection.first_to_second, Bytes(100)));
    must(peers.receiver.engine->wait_message(kLimit));
    leave(peers);
    expect_done(sent, round);
    forget(peers);
  }
}

// A receiver with several links ends them one after the other. Pages counted over a link are acknowledged over that
// link.
TEST_P(Acknowledgement, OverSeveralLinks) {
  for (size_t round = 0; round < kRounds; ++round) {
    Peers peers = meet(2);
    TransferEngine& receiver = *peers.receiver.engine;
    const auto write = [&](uint64_t writes) {
      const CounterSet set = must(receiver.alloc_counters(1));
      must(receiver.expect(set.id, {writes}));
      std::vector<TransferId> transfers;
      for (uint64_t i = 0; i < writes; ++i) {
        transfers.push_back(must(sender.engine->write_one(peers.connection.first_to_second, sender.region, i * kPage,
                                                          peers.region, i * kPage, kPage, set.immediates[0])));
      }
      must(receiver.wait_counters(set.id, kLimit));
      return transfers;
    };
    write(1);  // the other links are made once there is something to write
    const size_t links = receiver.domains().size();
    await([&] { return receiver.stats().links == links && sender.engine->stats().links == links; }, "all links");
    const std::vector<TransferId> transfers = write(kPages);
    leave(peers);
    for (const TransferId transfer : transfers) expect_done(transfer, round);
    forget(peers);
  }
}

// The sender receives both events in one turn, and reports neither before the end of the turn.
TEST_F(Scheduler, WhatWasAcknowledgedJustBeforeThePeersEndIsDone) {
  connect(1);
  const auto acknowledged = open();
  const auto pending = open();
  write(*acknowledged, 100);
  scheduler.seal(*acknowledged);
  post_all();
  scheduler.settle();
  scheduler.complete(postings(0)[0].work, nullptr);
  scheduler.fail_peer(*peer, kBroken);
  scheduler.settle();
  const std::optional<Event> done = ended();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->id, acknowledged->id);
  EXPECT_EQ(done->kind, EventKind::kTransferDone);
  const std::optional<Event> failed = ended();
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(failed->id, pending->id) << "open: more could have followed";
  EXPECT_EQ(failed->kind, EventKind::kTransferFailed);
  expect_clean();
}

}  // namespace
}  // namespace kvc::test::acknowledgement
