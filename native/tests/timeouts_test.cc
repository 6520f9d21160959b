// Blocking calls with a limit: repeated in short slices, each does what one long call does. Runs over each lane.

#include <atomic>
#include <thread>

#include "tests/nics.h"
#include "tests/rig.h"

namespace kvc::test {
namespace {

constexpr Timeout kSlice = std::chrono::milliseconds(1);

class Timeouts : public testing::TestWithParam<std::string> {
 protected:
  // Fences and withdrawals of the receiver finish once `through` is set.
  Timeouts()
      : pair(config("sender", GetParam()), nics.with(config("receiver", GetParam())), 4096),
        receiver(*pair.receiver.engine) {}
  ~Timeouts() override { through = true; }

  void hold() {
    for (size_t i = 0; i < receiver.domains().size(); ++i) {
      nics[i].set_ends([this] {
        ++tries;
        return through.load();
      });
    }
  }
  // Calls in slices until one of them did not time out before the transfer thread had begun.
  template <typename Call>
  void begin(Call call) {
    while (tries == 0) EXPECT_EQ(call(kSlice).error().code, ErrorCode::kTimeout);
  }
  // Calls in slices until it finishes, which may take several of them.
  template <typename Call>
  Status in_slices(Call call) {
    int timeouts = 0;
    while (true) {
      Status status = call(kSlice);
      if (status.ok() || status.error().code != ErrorCode::kTimeout) {
        EXPECT_GE(timeouts, 3);
        return status;
      }
      if (++timeouts < 3) continue;
      through = true;
      // No call waits for it any more: it must not happen behind the caller's back.
      for (int turn = 0; turn < 3; ++turn) must(receiver.set_message_callback({}));
    }
  }
  // The turn in which it finishes begins within a slice and ends after it. Its success must not be lost between that
  // slice and the next one, which would find no peer.
  template <typename Call>
  Status get_through_late(Call call) {
    constexpr auto kTurn = 10 * kSlice;
    for (size_t i = 0; i < receiver.domains().size(); ++i) {
      nics[i].set_ends([=] {
        std::this_thread::sleep_for(kTurn);  // no event but the time itself
        return true;
      });
    }
    Status status = call(kSlice);
    while (!status.ok() && status.error().code == ErrorCode::kTimeout) {
      std::this_thread::sleep_for(2 * kTurn);  // work that it may have left running has ended
      status = call(kSlice);
    }
    return status;
  }

  Nics nics;
  std::atomic<bool> through{false};
  std::atomic<int> tries{0};
  Pair pair;
  TransferEngine& receiver;
};
INSTANTIATE_TEST_SUITE_P(Lanes, Timeouts, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

TEST_P(Timeouts, AFenceInSlicesIsAFence) {
  hold();
  const TransferId open = must(receiver.open_transfer(pair.to_sender));
  begin([&](Timeout timeout) { return receiver.fence(pair.to_sender, timeout); });
  EXPECT_EQ(receiver.stats().peers, 1U) << "a write of it may still land: it is not forgotten";
  EXPECT_EQ(receiver.open_transfer(pair.to_sender).error().code, ErrorCode::kPeerDown);
  must(in_slices([&](Timeout timeout) { return receiver.fence(pair.to_sender, timeout); }));
  EXPECT_EQ(receiver.stats().peers, 0U);
  EXPECT_EQ(receiver.fence(pair.to_sender, kSlice).error().code, ErrorCode::kUnknownPeer);
  EXPECT_EQ(ended(receiver, open).kind, EventKind::kTransferFailed);
  EXPECT_TRUE(receiver.poll_events(8).empty());
  // They can connect again.
  must(pair.sender.engine->fence(pair.to_receiver, kLimit));
  const Connection again = connect(*pair.sender.engine, receiver);
  EXPECT_EQ(ended(receiver, must(receiver.send(again.second_to_first, Bytes(1)))).kind, EventKind::kTransferDone);
}

TEST_P(Timeouts, ADeregistrationInSlicesIsADeregistration) {
  hold();
  begin([&](Timeout timeout) { return receiver.deregister_memory(pair.receiver.region, timeout); });
  EXPECT_EQ(receiver.stats().regions, 1U) << "a write may still land there: it stays registered";
  // From here on it is no valid source.
  const TransferId from_it =
      must(receiver.write_one(pair.to_sender, pair.receiver.region, 0, pair.sender_region, 0, 64, std::nullopt));
  const Event failed = ended(receiver, from_it);
  ASSERT_EQ(failed.kind, EventKind::kTransferFailed);
  EXPECT_EQ(failed.error->code, ErrorCode::kUnknownRegion);
  must(in_slices([&](Timeout timeout) { return receiver.deregister_memory(pair.receiver.region, timeout); }));
  EXPECT_EQ(receiver.stats().regions, 0U);
  EXPECT_EQ(receiver.deregister_memory(pair.receiver.region, kSlice).error().code, ErrorCode::kUnknownRegion);
  // No peer writes there, and the memory can be registered again.
  const TransferId late = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                             pair.receiver_region, 0, 64, std::nullopt));
  EXPECT_EQ(ended(*pair.sender.engine, late).kind, EventKind::kTransferFailed);
  must(receiver.register_memory(pair.receiver.data(), 4096, pair.receiver.memory.fd(), 0));
}

TEST_P(Timeouts, AFenceThatGetsThroughAsTheTimeIsOverSucceeds) {
  must(get_through_late([&](Timeout timeout) { return receiver.fence(pair.to_sender, timeout); }));
}

TEST_P(Timeouts, ADeregistrationThatGetsThroughAsTheTimeIsOverSucceeds) {
  must(get_through_late([&](Timeout timeout) { return receiver.deregister_memory(pair.receiver.region, timeout); }));
}

}  // namespace
}  // namespace kvc::test
