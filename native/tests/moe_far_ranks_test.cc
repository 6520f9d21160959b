// Expert groups over several nodes: ranks as threads, packets over every lane. Every byte is checked against the
// definition of a step, also while a NIC of several dies.
#include <cstdlib>
#include <future>

#include "moe/cpu_exchange.h"
#include "moe/far_ranks.h"
#include "moe/packet.h"
#include "tests/moe_any_step.h"
#include "tests/moe_test_support.h"
#include "tests/nics.h"

namespace kvc::moe::far_ranks {
namespace {

using test::kLimit;

using NodeOfRank = std::vector<uint32_t>;

// Ranks on several nodes, connected in pairs, before any of them has a group.
class Nodes {
 public:
  Nodes(const std::string& lane, NodeOfRank nodes, size_t domains = 1, const GroupConfig& group = Stepper::config(),
        uint32_t row_bytes = 32 << 10, uint32_t hidden = 16 << 10)
      : nodes_(std::move(nodes)), nics_(nodes_.size()) {
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      FarConfig config{rank, ranks(), 0, group.slots, group.max_tokens, row_bytes, hidden};
      for (uint32_t other = 0; other < ranks(); ++other) {
        if (nodes_[other] != nodes_[rank]) config.far |= 1U << other;
      }
      EngineConfig engine = test::config("rank-" + std::to_string(rank), lane, domains);
      if (lane == "verbs") {
        // Nodes take the NICs of the two sides in turns, so that packets cross the wire.
        const char* const side = nodes_[rank] % 2 == 0 ? "sender" : "receiver";
        for (size_t i = 0; i < engine.domains.size(); ++i) engine.domains[i].device = test::device(side, i);
      }
      far_.push_back(must(FarRanks::create(nics_[rank].with(std::move(engine)), config)));
    }
    for (uint32_t low = 0; low < ranks(); ++low) {
      for (uint32_t high = low + 1; high < ranks(); ++high) {
        if (nodes_[low] == nodes_[high]) continue;
        const Bytes accepted = must(far_[high]->accept(low, must(far_[low]->offer(high))));
        must(far_[high]->meet(low, must(far_[low]->complete(high, accepted))));
      }
    }
    for (const auto& far : far_) must(far->begin());
  }

  uint32_t ranks() const { return static_cast<uint32_t>(nodes_.size()); }
  FarRanks& far(uint32_t rank) { return *far_[rank]; }
  // Waits for others that have left, or that the rank cannot reach any more, and returns them.
  std::vector<FarRanks::Departure> await_departures(uint32_t rank) {
    std::vector<FarRanks::Departure> gone;
    test::await(
        [&] {
          gone = far(rank).departures();
          return !gone.empty();
        },
        "a departure");
    return gone;
  }
  // Closes the rank's lanes.
  void end(uint32_t rank) { far_[rank].reset(); }
  test::Nics& nics(uint32_t rank) { return nics_[rank]; }

  // Runs `work` for every rank, in a thread. Ranks of a node pass descriptors to each other as processes do.
  void run(const std::function<void(Rank&)>& work, const std::function<void()>& meanwhile = [] {}) {
    std::vector<std::string> texts;
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      texts.push_back("1 " + std::to_string(rank) + " " + std::to_string(ranks()) + " 0 -1");
    }
    std::vector<std::vector<int>> mesh(ranks(), std::vector<int>(ranks(), -1));
    for (uint32_t a = 0; a < ranks(); ++a) {
      for (uint32_t b = a + 1; b < ranks(); ++b) {
        std::array<int, 2> ends{};
        ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
        mesh[a][b] = ends[0];
        mesh[b][a] = ends[1];
      }
    }
    std::vector<std::future<void>> ends;
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      for (const int fd : mesh[rank]) texts[rank] += " " + std::to_string(fd);
      ends.push_back(std::async(std::launch::async, [this, &work, rank, text = texts[rank]] {
        Rank own(text);
        own.far = far_[rank].get();
        work(own);
        own.stop_watching();
        must(own.group->close(10'000'000'000));
      }));
    }
    meanwhile();
    for (std::future<void>& end : ends) end.get();
  }

 private:
  const NodeOfRank nodes_;
  std::vector<test::Nics> nics_;  // outlive the lanes
  std::vector<std::unique_ptr<FarRanks>> far_;
};

class MoeNodes : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Lanes, MoeNodes, testing::ValuesIn(test::providers()),
                         [](const auto& info) { return test::label(info.param); });

TEST_P(MoeNodes, AnyStepIsWhatItsDefinitionSays) {
  constexpr uint64_t kSteps = 24;
  for (const NodeOfRank& layout : {NodeOfRank{0, 0, 1, 1}, NodeOfRank{0, 1, 0, 1}, NodeOfRank{0, 1, 2}}) {
    Nodes nodes(GetParam(), layout);
    nodes.run([&](Rank& rank) {
      Stepper stepper(rank);
      for (uint64_t seed = 1; seed <= kSteps && !testing::Test::HasFailure(); ++seed) {
        stepper.run(any_step(seed, nodes.ranks()));
      }
      rank.barrier();
      // Two scatters a step, and two immediates from each far rank, whatever the sizes are.
      EXPECT_EQ(nodes.far(rank.rank).counts().scatters, 2 * kSteps);
      EXPECT_EQ(nodes.far(rank.rank).counts().immediates,
                2 * kSteps * static_cast<uint64_t>(std::popcount(nodes.far(rank.rank).config().far)));
    });
  }
}

TEST_P(MoeNodes, TwoSlotsAreUnderWayTogether) {
  Nodes nodes(GetParam(), {0, 0, 1, 1});
  nodes.run([&](Rank& rank) {
    Stepper stepper(rank);
    for (uint64_t seed = 200; seed < 210 && !testing::Test::HasFailure(); ++seed) {
      std::array<Step, 2> steps = {any_step(seed, nodes.ranks()), any_step(seed + 100, nodes.ranks())};
      steps[1].owners = steps[0].owners;
      for (uint32_t slot = 0; slot < 2; ++slot) {
        steps[slot].slot = slot;
        stepper.prepare(steps[slot]);
      }
      for (const uint32_t phase : {kSend, kReceive}) {
        for (const Step& step : steps) stepper.dispatch(step, phase);
      }
      for (const Step& step : steps) stepper.experts(step);
      for (const uint32_t phase : {kSend, kReceive}) {
        for (const Step& step : steps) stepper.combine(step, phase);
      }
      for (const Step& step : steps) stepper.check(step);
    }
    rank.barrier();
  });
}

// A step whose packets are above the 1 MiB of one batch: they are split, and the immediate follows alone.
Step large_step(uint64_t seed, uint32_t ranks) {
  Step step;
  step.seed = seed;
  step.sizes.assign(ranks, 80);
  step.ids_bytes = 8;
  step.shapes = {{16 << 10, false}, {16, true}};
  step.hidden = 8 << 10;
  return step;
}
// Runs the step, in which every rank gets every row, and compares rows and sums with their definition.
void run_large(const Rank& rank, const Step& step) {
  Group& group = *rank.group;
  std::vector<std::vector<std::byte>> data;
  std::vector<ColumnSpec> columns;
  for (size_t i = 0; i < step.shapes.size(); ++i) {
    data.push_back(step.column(rank.rank, i));
    columns.push_back({data.back().data(), step.shapes[i].row_bytes, step.offset(i), step.shapes[i].to_all});
  }
  const std::vector<int64_t> ids = step.ids(rank.rank);
  must(group.dispatch(nullptr, 0, step.sizes, ids.data(), step.ids_bytes, step.top_k, columns, kSend | kReceive));
  std::vector<unsigned char> area(step.offset(step.shapes.size()));
  step.dispatch(area, rank.rank);
  EXPECT_EQ(std::memcmp(group.base() + group.layout().dispatch(0), area.data(), area.size()), 0)
      << "rank " << rank.rank << ", step " << step.seed;
  unsigned char* results = group.base() + group.layout().combine(0);
  for (uint32_t row = 0; row < step.rows(); ++row) {
    const std::vector<uint16_t> result = step.result(rank.rank, row);
    std::memcpy(results, result.data(), result.size() * 2);
    results += result.size() * 2;
  }
  const std::vector<uint16_t> expected = step.combined(rank.rank);
  const Place out({}, expected.size() * 2);
  must(group.combine(nullptr, 0, step.sizes, out.data(), step.hidden, false, kSend | kReceive));
  const auto* const sums = reinterpret_cast<const uint16_t*>(out.data());
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), sums, Step::same))
      << "rank " << rank.rank << ", step " << step.seed;
  EXPECT_FALSE(group.fault().has_value());
}
GroupConfig large_config(uint32_t ranks) {
  GroupConfig config = Stepper::config();
  config.max_tokens = 80;
  config.dispatch_bytes = uint64_t{ranks} * 80 * (17 << 10);
  config.combine_bytes = uint64_t{ranks} * 80 * (16 << 10);
  config.slots = 1;
  return config;
}

TEST_P(MoeNodes, LargePacketsAreSplitAndCountOnce) {
  const GroupConfig config = large_config(2);
  Nodes nodes(GetParam(), {0, 1}, 1, config);
  nodes.run([&](Rank& rank) {
    rank.form(config);
    for (uint64_t seed = 1; seed <= 2; ++seed) run_large(rank, large_step(seed, 2));
    rank.barrier();
    EXPECT_EQ(nodes.far(rank.rank).counts().immediates, 4U);
  });
}

// The NIC swallows packets of a step, which are thus in flight as it dies. They are written again over the other NIC.
TEST_P(MoeNodes, ANicThatDiesInAStepCostsNoByte) {
  const GroupConfig config = large_config(3);
  for (const uint64_t dies_in : {2U, 3U}) {
    Nodes nodes(GetParam(), {0, 0, 1}, 2, config);
    std::promise<void> reached;
    nodes.run(
        [&](Rank& rank) {
          rank.form(config);
          for (uint64_t seed = 1; seed <= 6 && !testing::Test::HasFailure(); ++seed) {
            // All ranks have the packets of the step before, so only packets of this step can get lost.
            if (seed == dies_in) {
              const uint64_t links = rank.rank == 2 ? 4 : 2;
              test::await([&] { return nodes.far(rank.rank).counts().links == links; }, "all links");
            }
            rank.barrier();
            if (rank.rank == 0 && seed == dies_in) {
              nodes.nics(0)[1].go_silent();
              reached.set_value();
            }
            rank.barrier();
            run_large(rank, large_step(seed, 3));
          }
          rank.barrier();
          EXPECT_EQ(nodes.far(rank.rank).counts().scatters, 12U);
        },
        [&] {
          reached.get_future().wait();
          test::await([&] { return nodes.nics(0)[1].swallowed() > 0; }, "a part of a packet");
          nodes.nics(0)[1].die();
        });
    EXPECT_GT(nodes.far(0).counts().links_lost, 0U);
    EXPECT_GT(nodes.far(0).counts().rewritten, 0U);
  }
}

// Needs NICs, and commands for the interface of the first one, as VerbsFailover does.
TEST(MoeVerbsFailover, ALinkTakenDownInAStepCostsNoByte) {
  const char* const down = std::getenv("KVC_TEST_LINK_DOWN");
  const char* const up = std::getenv("KVC_TEST_LINK_UP");
  if (down == nullptr || up == nullptr) GTEST_SKIP() << "needs commands in KVC_TEST_LINK_DOWN and KVC_TEST_LINK_UP";
  constexpr uint64_t kSteps = 8;
  constexpr uint64_t kTakenDownIn = 3;
  const GroupConfig config = large_config(4);
  Nodes nodes("verbs", {0, 0, 1, 1}, 2, config);
  nodes.run([&](Rank& rank) {
    rank.form(config);
    for (uint64_t seed = 1; seed <= kSteps && !testing::Test::HasFailure(); ++seed) {
      rank.barrier();
      std::future<int> taken;
      if (rank.rank == 0 && seed == kTakenDownIn) {
        taken = std::async(std::launch::async, [&] { return std::system(down); });
      }
      run_large(rank, large_step(seed, 4));
      if (taken.valid()) {
        EXPECT_EQ(taken.get(), 0) << down;
      }
    }
    rank.barrier();
    EXPECT_EQ(nodes.far(rank.rank).counts().scatters, 2 * kSteps);
  });
  EXPECT_EQ(std::system(up), 0) << up;
  EXPECT_GT(nodes.far(0).counts().links_lost, 0U);
}

TEST_P(MoeNodes, ARankOutOfReachEndsTheStepWithItsName) {
  Nodes nodes(GetParam(), {0, 0, 1});
  std::array<std::promise<Group*>, 3> groups;
  std::promise<void> reported;
  const std::shared_future<void> all_reported = reported.get_future().share();
  const auto work = [&](Rank& rank) {
    Stepper stepper(rank);
    groups[rank.rank].set_value(rank.group.get());
    Step step = any_step(1, 3);
    step.sizes.assign(3, 4);
    stepper.run(step);
    rank.barrier();
    if (rank.rank == 2) nodes.nics(2)[0].die();
    rank.barrier();
    stepper.prepare(step);
    // The links may still have taken the packets of the first step.
    while (!rank.group->fault()) {
      stepper.dispatch(step, kSend | kReceive);
      stepper.combine(step, kSend | kReceive);
    }
    EXPECT_EQ(rank.group->fault()->first, Fault::kLost);
    if (rank.rank != 2) {
      EXPECT_EQ(rank.group->fault()->second, 2U);
    }
    all_reported.wait();
  };
  // A rank may wait for a packet while it sends none.
  nodes.run(work, [&] {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      const std::vector<FarRanks::Departure> gone = nodes.await_departures(rank);
      EXPECT_FALSE(gone[0].left);
      EXPECT_NE(gone[0].reason, "");
      groups[rank].get_future().get()->lose(gone[0].rank);
    }
    reported.set_value();
  });
}

// Two ranks of different nodes in one thread, where the halves of an operation do not wait for each other.
class MoeFar : public testing::Test {
 protected:
  MoeFar() : nodes_("sim", {0, 1}, 1, Stepper::config(), 64, 64) {
    for (uint32_t rank : {0U, 1U}) {
      GroupConfig config = Stepper::config();
      config.rank = rank;
      config.ranks = 2;
      config.timeout_ns = 20'000'000'000;
      groups_[rank] = must(Group::create(config));
    }
  }
  ~MoeFar() override {
    for (const auto& group : groups_) EXPECT_TRUE(group->close(1'000'000'000).ok());
  }
  void join() {
    for (uint32_t rank : {0U, 1U}) must(groups_[rank]->join(nodes_.far(rank)));
  }
  Status dispatch(uint32_t rank, std::vector<uint32_t> sizes, uint32_t phases, uint32_t row_bytes = 16) {
    static const std::vector<unsigned char> rows(64 << 10, 7);
    const ColumnSpec column{rows.data(), row_bytes, 0, false};
    return groups_[rank]->dispatch(nullptr, 0, sizes, rows.data(), 4, 1, {&column, 1}, phases);
  }
  Status combine(uint32_t rank, std::vector<uint32_t> sizes, uint32_t phases, uint32_t hidden = 8) {
    return groups_[rank]->combine(nullptr, 0, sizes, out_.data(), hidden, false, phases);
  }

  Nodes nodes_;
  std::array<std::unique_ptr<Group>, 2> groups_;
  alignas(16) std::array<uint16_t, 2048> out_{};
};

template <typename Outcome>
void expect_refused(const Outcome& outcome, const std::string& words) {
  ASSERT_FALSE(outcome.ok()) << words;
  EXPECT_NE(outcome.error().message.find(words), std::string::npos) << outcome.error().to_string();
}

TEST_F(MoeFar, PacketsOfOtherSizesEndTheStepWithTheRanksName) {
  join();
  must(dispatch(1, {2, 1}, kSend));
  must(dispatch(0, {2, 2}, kSend | kReceive));
  ASSERT_TRUE(groups_[0]->fault().has_value());
  EXPECT_EQ(*groups_[0]->fault(), std::pair(Fault::kLost, 1U));
  EXPECT_NE(nodes_.far(0).failure(1).find("of other sizes"), std::string::npos) << nodes_.far(0).failure(1);
}

// The sizes of a combine say where the rows of received packets are.
TEST_F(MoeFar, ACombineHasTheSizesOfTheDispatchBefore) {
  join();
  expect_refused(combine(0, {2, 1}, kSend), "in turns");
  must(dispatch(0, {2, 1}, kSend));
  must(dispatch(1, {2, 1}, kSend | kReceive));
  expect_refused(dispatch(0, {1, 2}, kReceive), "the sizes differ");
  must(dispatch(0, {2, 1}, kReceive));
  expect_refused(dispatch(0, {2, 1}, kSend), "in turns");
  expect_refused(combine(0, {1, 2}, kSend | kReceive), "the sizes differ");
  must(combine(0, {2, 1}, kSend));
  expect_refused(combine(0, {2, 1}, kSend), "in turns");
  expect_refused(combine(0, {2, 2}, kReceive), "the sizes differ");
  must(combine(1, {2, 1}, kSend | kReceive));
  must(combine(0, {2, 1}, kReceive));
  for (const auto& group : groups_) EXPECT_FALSE(group->fault().has_value());
}

TEST_F(MoeFar, ACombineBeforeTheRowsCameSendsNone) {
  join();
  for (uint32_t phases : {kSend | kReceive, kSend}) {
    must(dispatch(1, {1, 1}, kSend));
    must(dispatch(0, {1, 1}, phases));
    must(combine(0, {1, 1}, kSend));
    must(combine(1, {1, 1}, kSend));
  }
  must(combine(1, {1, 1}, kReceive));
  EXPECT_EQ(*groups_[1]->fault(), std::pair(Fault::kLost, 0U)) << "no results came for its row";
}

// A rank leaves with all packets that it needs, while the other ranks may still send to it.
TEST_F(MoeFar, PacketsToARankThatHasLeftEndNoStep) {
  join();
  nodes_.far(0).leave(kLimit);
  // The third combine waits until the packets of the first one have ended.
  for (int step = 0; step < 3; ++step) {
    must(dispatch(1, {1, 1}, kSend));
    must(combine(1, {1, 1}, kSend));
  }
  EXPECT_FALSE(groups_[1]->fault().has_value());
  EXPECT_EQ(nodes_.far(1).failure(0), "");
}

TEST_F(MoeFar, LanesAreNotJoinedDuringAnotherCall) {
  join();
  std::future<Status> waiting = std::async(std::launch::async, [&] { return dispatch(1, {1, 1}, kSend | kReceive); });
  test::await(
      [&] {
        const Status joined = groups_[1]->join(nodes_.far(1));
        return joined.error().message.find("another call of this group is running") != std::string::npos;
      },
      "the other call");
  must(dispatch(0, {1, 1}, kSend));
  must(waiting.get());
}

TEST(MoeLeaving, ARankThatDoesNotRespondKeepsNoOtherRankFromAGoodbye) {
  Nodes nodes("sim", {0, 1, 2});
  nodes.nics(1)[0].go_silent();
  nodes.far(0).leave(Timeout(1'000'000));
  nodes.end(0);
  const std::vector<FarRanks::Departure> gone = nodes.await_departures(2);
  EXPECT_EQ(gone[0].rank, 0U);
  EXPECT_TRUE(gone[0].left) << gone[0].reason;
}

TEST_F(MoeFar, RefusesWhatCannotBe) {
  expect_refused(dispatch(0, {1, 1}, kSend), "rank 1 is not attached");
  GroupConfig config = Stepper::config();
  config.ranks = 2;
  config.survive = true;
  expect_refused(must(Group::create(config))->join(nodes_.far(0)), "does not survive");
  config.survive = false;
  config.slots = 1;
  expect_refused(must(Group::create(config))->join(nodes_.far(0)), "other sizes than the group");
  must(groups_[0]->attach(1, must(groups_[1]->descriptor()).get()));
  expect_refused(groups_[0]->join(nodes_.far(0)), "rank 1 is attached");
  must(groups_[1]->join(nodes_.far(1)));
  expect_refused(groups_[1]->join(nodes_.far(1)), "has lanes already");
  expect_refused(groups_[1]->attach(0, must(groups_[0]->descriptor()).get()), "attached already");
  expect_refused(dispatch(1, {0, 8}, kSend, 2048), "rows of 64 bytes");
  must(dispatch(1, {0, 1}, kSend));
  expect_refused(combine(1, {0, 1}, kSend, 128), "up to 64");

  const auto create = [](FarConfig far) { return FarRanks::create(test::config("rank-0", "sim"), far); };
  const FarConfig good{0, 2, 2, 1, 4, 16, 8};
  const auto with = [&](auto change) {
    FarConfig changed = good;
    change(changed);
    return create(changed);
  };
  EXPECT_TRUE(create(good).ok());
  expect_refused(with([](FarConfig& c) { c.ranks = 9; }), "2 to 8 ranks");
  expect_refused(with([](FarConfig& c) { c.rank = 2; }), "2 to 8 ranks");
  expect_refused(with([](FarConfig& c) { c.far = 0; }), "one or more");
  expect_refused(with([](FarConfig& c) { c.far = 1; }), "other ranks of the group");
  expect_refused(with([](FarConfig& c) { c.far = 4; }), "other ranks of the group");
  expect_refused(with([](FarConfig& c) { c.slots = 3; }), "out of range");
  expect_refused(with([](FarConfig& c) { c.row_bytes = 0; }), "out of range");
  expect_refused(with([](FarConfig& c) { c.hidden = ~0U; }), "out of range");
  const auto far = must(create(good));
  expect_refused(far->offer(0), "not on another node");
  expect_refused(far->begin(), "rank 1 is not connected");
  must(far->offer(1));
  expect_refused(far->complete(1, Bytes(3)), "not the answer of a rank");
  expect_refused(far->meet(1, Bytes(3)), "not the introduction of a rank");
}

TEST_F(MoeFar, ARankThatLeavesIsReportedAsSuch) {
  join();
  const std::array<std::byte, 2> message{std::byte{1}, std::byte{2}};
  must(nodes_.far(0).send(1, message));
  test::await(
      [&] {
        const auto received = nodes_.far(1).receive();
        return !received.empty() && received[0] == std::pair(0U, Bytes(message.begin(), message.end()));
      },
      "the message");
  nodes_.far(0).leave(kLimit);
  const std::vector<FarRanks::Departure> gone = nodes_.await_departures(1);
  EXPECT_EQ(gone[0].rank, 0U);
  EXPECT_TRUE(gone[0].left);
}

// A far rank whose packet comes, and which leaves, whenever a test wants it.
class LaterFar final : public FarSlot {
 public:
  explicit LaterFar(DispatchLaunch& launch) : launch_(launch) {}

  bool comes_and_leaves = false;  // between the reading of the flags and that of the departures

  uint32_t ranks() const noexcept override { return 2; }
  uint32_t lost() const noexcept override {
    if (comes_and_leaves) launch_.host->left |= 2;
    return 0;
  }
  bool can_send(const DispatchLaunch&) const noexcept override { return false; }
  bool can_send(const CombineLaunch&) const noexcept override { return false; }
  void send(const DispatchLaunch&) override {}
  void send(const CombineLaunch&) override {}
  void receive(const DispatchLaunch& launch) override {
    if (launch.host->left != 0) cpu_exchange::flag_of(launch.segments[0], launch.arrived, 1).store(5);
  }
  void receive(const CombineLaunch&) override {}
  const unsigned char* results(uint32_t) const noexcept override { return nullptr; }

 private:
  DispatchLaunch& launch_;
};

class MoeWaitsForFar : public testing::Test {
 protected:
  MoeWaitsForFar() {
    launch_.segments[0] = segment_.data();
    launch_.control = &control_;
    launch_.host = &words_;
    launch_.waiting = kMaxRanks * kFlagBytes;
    launch_.timeout_ns = 20'000'000'000;
    launch_.ranks = 2;
    cpu_exchange::flag_of(segment_.data(), 0, 0).store(5);
  }

  std::vector<unsigned char> segment_ = std::vector<unsigned char>(2 * kMaxRanks * kFlagBytes);
  Control control_{};
  HostWords words_{};
  DispatchLaunch launch_{};
  LaterFar far_{launch_};
};

TEST_F(MoeWaitsForFar, ARankThatLeavesAfterItsPacketCameIsNotLost) {
  far_.comes_and_leaves = true;
  EXPECT_TRUE(cpu_exchange::wait_for_flags(launch_, launch_.arrived, 5, Fault::kDispatchTimeout, &far_));
  EXPECT_EQ(words_.fault, 0U);
}

TEST_F(MoeWaitsForFar, ARankThatCannotSendNamesItself) {
  launch_.timeout_ns = 1'000'000;
  EXPECT_FALSE(cpu_exchange::wait_to_send(launch_, far_, Fault::kDispatchTimeout));
  EXPECT_EQ(words_.fault, static_cast<uint32_t>(Fault::kDispatchTimeout) << 16);
}

// The packet of a faulty rank must not lead to bytes outside of its rows.
TEST(MoePacket, RefusesNumbersOutOfRangeAndOutOfOrder) {
  std::vector<unsigned char> segment(4096, 0xEE);
  std::vector<unsigned char> rows(64);
  std::array<uint32_t, 4> masks{3, 1, 3, 3};
  Control control{};
  control.epoch = 5;
  DispatchLaunch launch{};
  launch.segments[0] = segment.data();
  launch.columns[0] = {rows.data(), 0, 16, 16, 0, 0};
  launch.column_count = 1;
  launch.masks = masks.data();
  launch.control = &control;
  launch.ranks = 2;
  launch.tokens = 4;
  launch.sizes[0] = launch.sizes[1] = 4;
  const DispatchPackets packets(launch);
  std::vector<unsigned char> packet(packets.bytes(4, 4));
  ASSERT_EQ(packets.write(1, 5, packet.data()), 3U);
  std::vector<uint32_t> numbers;
  EXPECT_TRUE(packets.place(1, packet.data(), numbers));
  EXPECT_EQ(numbers, (std::vector<uint32_t>{0, 2, 3}));
  EXPECT_EQ(segment[5 * 16], 0xEE) << "token 1 was not sent";
  EXPECT_EQ(segment[6 * 16], 0);
  const auto with = [&](size_t at, uint32_t value) {
    std::vector<unsigned char> changed = packet;
    std::memcpy(changed.data() + at, &value, sizeof(value));
    return packets.place(1, changed.data(), numbers);
  };
  EXPECT_FALSE(with(offsetof(PacketHeader, epoch), 4));
  EXPECT_FALSE(with(offsetof(PacketHeader, rows), 5));
  EXPECT_FALSE(with(offsetof(PacketHeader, tokens), 3));
  EXPECT_FALSE(with(kPacketHeaderBytes + 2 * 32, 4));
  EXPECT_FALSE(with(kPacketHeaderBytes + 2 * 32, 2)) << "a number twice";
}

}  // namespace
}  // namespace kvc::moe::far_ranks
