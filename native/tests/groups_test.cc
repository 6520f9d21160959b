// Peer groups over each provider: scatter and barrier, one event for all members. A failure affects one member only.

#include <algorithm>
#include <cstring>
#include <future>
#include <map>

#include "tests/rig.h"

namespace kvc::test {
namespace {

// A sender and its members. Each member has a region that the sender knows, and a counter.
struct Stage {
  struct Member {
    std::unique_ptr<Side> side;
    PeerId peer = 0;
    RemoteRegionId region = 0;
    CounterSet counter;
    TransferEngine& engine() const { return *side->engine; }
  };

  Stage(const std::string& provider, size_t members, size_t bytes, size_t domains = 1)
      : sender(config("sender", provider, domains), bytes) {
    std::vector<PeerId> peers;
    for (size_t i = 0; i < members; ++i) {
      Member& member = this->members.emplace_back();
      member.side = std::make_unique<Side>(config("member-" + std::to_string(i), provider, domains), bytes);
      member.peer = connect(*sender.engine, *member.side->engine).first_to_second;
      member.region =
          must(sender.engine->import_region(member.peer, must(member.engine().region_descriptor(member.side->region))));
      member.counter = must(member.engine().alloc_counters(1));
      peers.push_back(member.peer);
    }
    group = must(sender.engine->add_peer_group(peers));
  }

  // One slice of `bytes` bytes per member. Member i gets bytes [i * bytes, (i + 1) * bytes) of the source at offset 8.
  std::vector<ScatterSlice> slices(uint64_t bytes) const {
    std::vector<ScatterSlice> slices;
    for (const Member& member : members) {
      slices.push_back({slices.size() * bytes, member.region, 8, bytes, member.counter.immediates[0]});
    }
    return slices;
  }
  std::vector<uint32_t> immediates() const {
    std::vector<uint32_t> immediates;
    for (const Member& member : members) immediates.push_back(member.counter.immediates[0]);
    return immediates;
  }
  // Waits until every member's counter has reached `count`.
  void await_counts(uint64_t count) {
    for (Member& member : members) {
      if (member.side == nullptr) continue;
      must(member.engine().expect(member.counter.id, {count}));
      must(member.engine().wait_counters(member.counter.id, kLimit));
      EXPECT_EQ(must(member.engine().counter_values(member.counter.id))[0], count);
    }
  }

  Side sender;
  std::vector<Member> members;
  PeerGroupId group = 0;
};

class Groups : public testing::TestWithParam<std::string> {
 protected:
  std::string provider() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Lanes, Groups, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

TEST_P(Groups, AScatterGivesEachMemberItsSliceAndCountsItThere) {
  constexpr uint64_t kBytes = 3000;
  Stage stage(provider(), 5, 5 * kBytes + 8);
  fill_random(stage.sender.data(), stage.sender.memory.size(), 1);
  const TransferId id = must(stage.sender.engine->scatter(stage.group, stage.sender.region, stage.slices(kBytes)));
  const Event done = ended(*stage.sender.engine, id);
  EXPECT_EQ(done.kind, EventKind::kTransferDone);
  EXPECT_EQ(done.pages, 5U);
  EXPECT_EQ(done.bytes, 5 * kBytes);
  EXPECT_TRUE(done.failures.empty());
  stage.await_counts(1);
  for (size_t i = 0; i < stage.members.size(); ++i) {
    EXPECT_EQ(std::memcmp(stage.members[i].side->data() + 8, stage.sender.data() + i * kBytes, kBytes), 0) << i;
  }
  EXPECT_EQ(stage.sender.engine->stats().transfers_open, 0U);
}

TEST_P(Groups, ASliceOfNothingIsItsImmediateAloneOrNothingAtAll) {
  Stage stage(provider(), 3, 4096);
  std::vector<ScatterSlice> slices = stage.slices(100);
  slices[0].bytes = 0;
  slices[2] = {};
  const Event done =
      ended(*stage.sender.engine, must(stage.sender.engine->scatter(stage.group, stage.sender.region, slices)));
  EXPECT_EQ(done.kind, EventKind::kTransferDone);
  EXPECT_EQ(done.bytes, 100U);
  for (const size_t i : {0U, 1U}) {
    Stage::Member& member = stage.members[i];
    must(member.engine().expect(member.counter.id, {1}));
    must(member.engine().wait_counters(member.counter.id, kLimit));
  }
  EXPECT_EQ(must(stage.members[2].engine().counter_values(stage.members[2].counter.id))[0], 0U);
  EXPECT_EQ(ended(*stage.sender.engine,
                  must(stage.sender.engine->scatter(stage.group, stage.sender.region, std::vector<ScatterSlice>(3))))
                .kind,
            EventKind::kTransferDone);
}

TEST_P(Groups, ABarrierRaisesEachMembersCounterByOneAndWritesNothing) {
  for (const size_t domains : {1, 3}) {
    Stage stage(provider(), 4, 4096, domains);
    constexpr int kRounds = 20;
    for (int round = 0; round < kRounds; ++round) {
      const Event done =
          ended(*stage.sender.engine, must(stage.sender.engine->barrier(stage.group, stage.immediates())));
      EXPECT_EQ(done.kind, EventKind::kTransferDone);
    }
    stage.await_counts(kRounds);
    for (const Stage::Member& member : stage.members) {
      EXPECT_TRUE(
          std::all_of(member.side->data(), member.side->data() + 4096, [](std::byte b) { return b == std::byte{0}; }));
    }
  }
}

TEST_P(Groups, ADeadMemberFailsLoudlyAndStopsNoOther) {
  Stage stage(provider(), 4, 1 << 20);
  fill_random(stage.sender.data(), 1 << 20, 1);
  Stage::Member& dead = stage.members[1];
  std::vector<ScatterSlice> slices = stage.slices(100'000);
  std::vector<uint32_t> immediates = stage.immediates();
  dead.side.reset();
  const auto expect_one_failure = [&](const Event& event) {
    EXPECT_EQ(event.kind, EventKind::kTransferFailed);
    ASSERT_EQ(event.failures.size(), 1U);
    EXPECT_EQ(event.failures[0].peer, dead.peer);
    EXPECT_EQ(event.failures[0].error.peer, "member-1");
    ASSERT_TRUE(event.error.has_value());
  };
  // Whether or not the sender has noticed it, and after it has fenced the peer.
  expect_one_failure(
      ended(*stage.sender.engine, must(stage.sender.engine->scatter(stage.group, stage.sender.region, slices))));
  expect_one_failure(ended(*stage.sender.engine, must(stage.sender.engine->barrier(stage.group, immediates))));
  must(stage.sender.engine->fence(dead.peer, kLimit));
  expect_one_failure(
      ended(*stage.sender.engine, must(stage.sender.engine->scatter(stage.group, stage.sender.region, slices))));
  expect_one_failure(ended(*stage.sender.engine, must(stage.sender.engine->barrier(stage.group, immediates))));
  stage.await_counts(4);
  EXPECT_EQ(std::memcmp(stage.members[3].side->data() + 8, stage.sender.data() + 300'000, 100'000), 0);
}

TEST_P(Groups, AWrongKeyIsThatMembersFailure) {
  Stage stage(provider(), 3, 4096);
  Bytes descriptor = must(stage.members[2].engine().region_descriptor(stage.members[2].side->region));
  descriptor.back() ^= std::byte{0xFF};  // the last byte of the last key
  std::vector<ScatterSlice> slices = stage.slices(100);
  slices[2].target = must(stage.sender.engine->import_region(stage.members[2].peer, descriptor));
  const Event event =
      ended(*stage.sender.engine, must(stage.sender.engine->scatter(stage.group, stage.sender.region, slices)));
  EXPECT_EQ(event.kind, EventKind::kTransferFailed);
  ASSERT_EQ(event.failures.size(), 1U);
  EXPECT_EQ(event.failures[0].peer, stage.members[2].peer);
  EXPECT_EQ(event.pages, 2U);
}

TEST_P(Groups, MistakesAreRefusedBeforeAnythingIsSent) {
  Stage stage(provider(), 2, 4096);
  TransferEngine& engine = *stage.sender.engine;
  const auto code = [](const auto& result) {
    return result.ok() ? "no error" : std::string(name(result.error().code));
  };
  std::vector<ScatterSlice> slices = stage.slices(100);
  const auto with = [&](auto change) {
    std::vector<ScatterSlice> changed = slices;
    change(changed);
    return code(engine.scatter(stage.group, stage.sender.region, changed));
  };
  EXPECT_EQ(with([](auto& s) { s.pop_back(); }), "INVALID_ARGUMENT");
  EXPECT_EQ(with([](auto& s) { std::swap(s[0].target, s[1].target); }), "INVALID_ARGUMENT");
  EXPECT_EQ(with([](auto& s) { s[1].target = 4711; }), "UNKNOWN_REGION");
  EXPECT_EQ(with([](auto& s) { s[1].source_offset = 4000; }), "OUT_OF_RANGE");
  EXPECT_EQ(with([](auto& s) { s[1].target_offset = UINT64_MAX; }), "OUT_OF_RANGE");
  EXPECT_EQ(with([](auto& s) { s[1].bytes = UINT64_MAX; }), "OUT_OF_RANGE");
  EXPECT_EQ(code(engine.scatter(4711, stage.sender.region, slices)), "INVALID_ARGUMENT");
  EXPECT_EQ(code(engine.scatter(stage.group, 4711, slices)), "UNKNOWN_REGION");
  EXPECT_EQ(code(engine.barrier(stage.group, {1})), "INVALID_ARGUMENT");
  EXPECT_EQ(code(engine.add_peer_group({})), "INVALID_ARGUMENT");
  EXPECT_EQ(code(engine.add_peer_group({4711})), "UNKNOWN_PEER");
  EXPECT_EQ(code(engine.add_peer_group({stage.members[0].peer, stage.members[0].peer})), "INVALID_ARGUMENT");
  const Handshake offered = must(engine.offer("nobody"));
  EXPECT_EQ(code(engine.add_peer_group({offered.peer})), "INVALID_ARGUMENT");
  must(engine.remove_peer_group(stage.group));
  EXPECT_EQ(code(engine.remove_peer_group(stage.group)), "INVALID_ARGUMENT");
  EXPECT_EQ(code(engine.barrier(stage.group, stage.immediates())), "INVALID_ARGUMENT");
  for (const Stage::Member& member : stage.members) {
    EXPECT_EQ(must(member.engine().counter_values(member.counter.id))[0], 0U);
  }
  EXPECT_EQ(engine.stats().transfers_open, 0U);
}

// No transfer has the id 0, also if a prepared scatter has free runs.
TEST_P(Groups, NoTransferIsZero) {
  Stage stage(provider(), 1, 4096);
  TransferEngine& engine = *stage.sender.engine;
  const ScatterId scatter = must(engine.prepare_scatter(
      stage.group,
      {{.member = 0, .source = stage.sender.region, .target = stage.members[0].region, .bytes = 64, .immediate = {}}}));
  const TransferId submitted = must(engine.submit_scatter(scatter, std::vector<ScatterUpdate>{{.bytes = 64}}));
  EXPECT_EQ(ended(engine, submitted).kind, EventKind::kTransferDone);
  EXPECT_FALSE(engine.cancel(0).ok());
  const Result<Event> waited = engine.wait_transfer(0, kLimit);
  ASSERT_FALSE(waited.ok());
  EXPECT_NE(waited.error().code, ErrorCode::kTimeout);
}

TEST_P(Groups, OneCallbackForAll) {
  Stage stage(provider(), 3, 4096);
  std::promise<Event> promise;
  const TransferId id = must(stage.sender.engine->barrier(stage.group, stage.immediates(), [&](const Event& event) {
    promise.set_value(event);
    throw std::runtime_error("a bad callback stops nothing");
  }));
  std::future<Event> future = promise.get_future();
  ASSERT_EQ(future.wait_for(kLimit), std::future_status::ready);
  EXPECT_EQ(future.get().id, id);
  stage.await_counts(1);
  EXPECT_TRUE(stage.sender.engine->poll_events(10).empty());
}

TEST_P(Groups, ClosingAndCancellingEndThem) {
  Stage stage(provider(), 2, 4 << 20);
  TransferEngine& engine = *stage.sender.engine;
  // Cancelled before, during, or after the writes: one event in each case.
  const TransferId id = must(engine.scatter(stage.group, stage.sender.region, stage.slices(2 << 20)));
  const Status cancelled = engine.cancel(id);
  const Event event = ended(engine, id);
  EXPECT_TRUE(event.kind == EventKind::kTransferDone ||
              (cancelled.ok() && event.kind == EventKind::kTransferCancelled));
  EXPECT_FALSE(engine.wait_transfer(id, Timeout(0)).ok());
  int events = 0;
  must(engine.barrier(stage.group, stage.immediates(), [&](const Event&) { ++events; }));
  stage.sender.engine.reset();
  EXPECT_EQ(events, 1);
}

}  // namespace
}  // namespace kvc::test
