// A scatter's parts, as the scheduler posts and ends them.

#include "engine/scatter.h"

#include "tests/scheduler_test_support.h"

namespace kvc::test {
namespace {

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

}  // namespace
}  // namespace kvc::test
