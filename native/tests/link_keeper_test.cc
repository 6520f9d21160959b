// The LinkKeeper alone, over domains that do exactly what the test requests.
#include "engine/link_keeper.h"

#include <array>
#include <chrono>
#include <vector>

#include "tests/scheduler_test_support.h"

namespace kvc::test {
namespace {

struct Owner final : LinkKeeper::Owner {
  std::vector<Error> lost;

  LinkId new_link(Peer&, Link&) override { return 100; }
  void forget_link(LinkId) override {}
  bool fence(Domain&, LinkId) override { return true; }
  void abandon_link(const Link&, LinkId) override {}
  void lose_peer(Peer& peer, Error error) override {
    peer.state = Peer::State::kDown;
    lost.push_back(std::move(error));
  }
  void offer_link(Peer&, const Link&, LinkId) override {}
  void accept_link(Peer&, const Link&, LinkId, uint32_t, Bytes) override {}
  void complete_link(Peer&, const Link&, LinkId, Bytes) override {}
};

class Keeper : public Scheduler {
 protected:
  // Makes the keeper believe that `time` has passed since the last step. `ran`: whether other steps ran meanwhile.
  void pass(Link& link, std::chrono::seconds time, bool ran) {
    link.repair->began -= time;
    link.repair->ask_due -= time;
    link.repair->due = ran ? LinkKeeper::Clock::now() : link.repair->due - time;
  }
  // The peer has closed its end, on which nothing has landed.
  void answer(const Link& link) {
    keeper.receive(*peer, 2, encode({.tag = MessageTag::kTallies, .link = 0, .epoch = link.epoch, .part = 0}));
  }

  Owner owner;
  LinkKeeper keeper{scheduler, counters, stats, owner};
};

TEST_F(Keeper, NotesALinkOnceHoweverMuchWasInFlight) {
  connect(3);
  peer->offerer = true;
  // As many as a verbs NIC may have in flight, over two links that break at once.
  for (int batch = 0; batch < 28'000; ++batch) {
    Link& broken = link(batch % 2 == 0 ? 0 : 1);
    keeper.broke(*peer, broken, broken.id, kBroken);
  }
  EXPECT_EQ(keeper.broken(), 2U);
  keeper.step();
  EXPECT_EQ(keeper.broken(), 0U);
  EXPECT_EQ(link(0).state, Link::State::kBroken);
  EXPECT_EQ(link(1).state, Link::State::kBroken);
  EXPECT_TRUE(owner.lost.empty());
  // A link that was made again may break again.
  answer(link(0));
  keeper.step();
  EXPECT_EQ(link(0).state, Link::State::kOut);
  link(0).id = 50;
  link(0).state = Link::State::kUp;
  keeper.broke(*peer, link(0), 50, kBroken);
  EXPECT_EQ(keeper.broken(), 1U);
}

TEST_F(Keeper, LosesAPeerThatDoesNotSettleInTime) {
  connect(2);
  keeper.broke(*peer, link(0), link(0).id, kBroken);
  keeper.step();
  ASSERT_EQ(link(0).state, Link::State::kBroken);
  pass(link(0), std::chrono::seconds(6), true);
  keeper.step();
  EXPECT_EQ(owner.lost.size(), 1U);
}

// The answer may be in the socket, unread.
TEST_F(Keeper, BlamesNoPeerForTheTimeInWhichItDidNotRunItself) {
  connect(2);
  peer->offerer = true;
  keeper.broke(*peer, link(0), link(0).id, kBroken);
  keeper.step();
  pass(link(0), std::chrono::seconds(6), false);
  keeper.step();
  EXPECT_TRUE(owner.lost.empty());
  answer(link(0));
  keeper.step();
  EXPECT_EQ(link(0).state, Link::State::kOut);
  EXPECT_TRUE(owner.lost.empty());

  // The same for a link that was offered.
  link(0).repair->due = LinkKeeper::Clock::now();
  keeper.step();
  ASSERT_EQ(link(0).state, Link::State::kOffered);
  pass(link(0), std::chrono::seconds(6), false);
  keeper.step();
  EXPECT_EQ(link(0).state, Link::State::kOffered);
}

TEST_F(Keeper, ReportsTheLinksThatWereLostWithTheLastReason) {
  const std::vector<std::string> names = {"nic 0", "nic 1"};
  std::vector<LostLink> lost;
  connect(2);
  peer->offerer = true;
  LinkKeeper::append_lost(*peer, names, lost);
  EXPECT_TRUE(lost.empty());

  keeper.broke(*peer, link(1), link(1).id, kBroken);
  keeper.step();
  LinkKeeper::append_lost(*peer, names, lost);
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_EQ(lost[0].peer, peer->id);
  EXPECT_EQ(lost[0].link, 1U);
  EXPECT_EQ(lost[0].links, 2U);
  EXPECT_EQ(lost[0].domain, "nic 1");
  EXPECT_EQ(lost[0].times_lost, 1U);
  EXPECT_FALSE(lost[0].up);
  EXPECT_EQ(lost[0].reason.message, kBroken.message);

  // A restored link stays in the list, and its losses add up.
  link(1).id = 50;
  link(1).state = Link::State::kUp;
  lost.clear();
  LinkKeeper::append_lost(*peer, names, lost);
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_TRUE(lost[0].up);
  keeper.broke(*peer, link(1), 50, kDenied);
  keeper.step();
  lost.clear();
  LinkKeeper::append_lost(*peer, names, lost);
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_EQ(lost[0].times_lost, 2U);
  EXPECT_EQ(lost[0].reason.message, kDenied.message);

  // A peer that is down has no links to lose.
  keeper.broke(*peer, link(0), link(0).id, kBroken);
  keeper.step();
  ASSERT_EQ(owner.lost.size(), 1U);
  lost.clear();
  LinkKeeper::append_lost(*peer, names, lost);
  EXPECT_TRUE(lost.empty());
}

// Its limit starts again: a silent peer is detected in the end.
TEST_F(Keeper, LosesAPeerThatIsSilentAfterAStopToo) {
  connect(2);
  keeper.broke(*peer, link(0), link(0).id, kBroken);
  keeper.step();
  pass(link(0), std::chrono::seconds(6), false);
  keeper.step();
  ASSERT_TRUE(owner.lost.empty());
  pass(link(0), std::chrono::seconds(6), true);
  keeper.step();
  EXPECT_EQ(owner.lost.size(), 1U);
}

}  // namespace
}  // namespace kvc::test
