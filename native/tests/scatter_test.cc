// The parts of a scatter, as the scheduler posts and ends them.

#include "engine/scatter.h"

#include "tests/scheduler_test_support.h"

namespace kvc::test {
namespace {

// All parts were in flight, so the peer's end does not find the slice in a queue. Its counting write would come after that
// end.
TEST_F(Scheduler, ASplitSliceWhosePartsEndBehindTheirPeerFails) {
  connect(1);
  const Scatter::Slice slice{source, target, 0, 0, 0, 8 * kMiB, kCounter};
  const auto scatter =
      std::make_shared<Scatter>(1, std::vector{peer}, std::vector{slice}, EventCallback{}, std::function<void()>{});
  ScatterRun* const submission = scatter->take(1);
  submission->fill(std::vector{ScatterUpdate{.bytes = 8 * kMiB}});
  scheduler.start(*submission);
  post_and_settle();
  ASSERT_EQ(bytes_posted()[0], 8 * kMiB);
  EXPECT_EQ(raised(0), 0U);
  scheduler.fail_peer(*peer, kBroken);
  complete(0);
  post_and_settle();
  const std::optional<Event> event = ended();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->kind, EventKind::kTransferFailed);
  expect_clean();
}

TEST_F(Scheduler, ASliceIsPostedAsItsSubmissionIsTakenUnlessItsPeerHasOtherWorkOrNoRoom) {
  connect(1);
  const auto scatter = std::make_shared<Scatter>(1, std::vector{peer},
                                                 std::vector<Scatter::Slice>{{source, target, 0, 0, 0, 8, kCounter}},
                                                 EventCallback{}, [] {});
  const auto submit = [&](uint64_t bytes) {
    ScatterRun* const run = scatter->take(++last_id);
    run->fill(std::vector<ScatterUpdate>{{.bytes = bytes}});
    scheduler.start(*run);
  };
  submit(1);
  EXPECT_EQ(bytes_posted()[0], 1U) << "posted by the command itself";

  const auto transfer = open();
  write(*transfer, 100);
  submit(2);
  EXPECT_EQ(bytes_posted()[0], 1U) << "what was there before goes before";
  post_all();
  ASSERT_EQ(postings(0).size(), 3U);
  EXPECT_EQ(postings(0)[1].bytes(), 100U);
  EXPECT_EQ(postings(0)[2].bytes(), 2U);

  domains[0]->busy = true;
  submit(3);
  EXPECT_EQ(postings(0).size(), 3U);
  domains[0]->busy = false;
  post_all();
  EXPECT_EQ(postings(0).size(), 4U) << "and is not forgotten";
  scheduler.seal(*transfer);
  run();
  expect_clean();
}

// Happens if a transfer engine closes between a submission and its start.
TEST_F(Scheduler, ASubmissionThatIsNeverStartedKeepsNothing) {
  connect(1);
  int ends = 0;
  auto scatter = std::make_shared<Scatter>(1, std::vector{peer},
                                           std::vector<Scatter::Slice>{{source, target, 0, 0, 0, 8, kCounter}},
                                           EventCallback{}, [&] { ++ends; });
  ScatterRun* const run = scatter->take(1);
  run->fill(std::vector<ScatterUpdate>{{.bytes = 8}});
  EXPECT_TRUE(scatter->release());
  EXPECT_EQ(ends, 0);
  const std::weak_ptr<Scatter> kept = std::exchange(scatter, nullptr);
  ASSERT_FALSE(kept.expired());
  run->abandon();
  EXPECT_TRUE(kept.expired());
  EXPECT_EQ(ends, 1);
  EXPECT_FALSE(ended().has_value());
}

TEST_F(Scheduler, NoFreeRunIsFound) {
  connect(1);
  const auto scatter = std::make_shared<Scatter>(1, std::vector{peer},
                                                 std::vector<Scatter::Slice>{{source, target, 0, 0, 0, 8, kCounter}},
                                                 EventCallback{}, [] {});
  ScatterRun* const submission = scatter->take(7);
  submission->fill(std::vector<ScatterUpdate>{{.bytes = 8}});
  EXPECT_EQ(scatter->find(7), submission);
  scheduler.start(*submission);
  run();
  EXPECT_TRUE(ended().has_value());
  EXPECT_EQ(scatter->find(7), nullptr);
  EXPECT_EQ(scatter->find(0), nullptr);
}

}  // namespace
}  // namespace kvc::test
