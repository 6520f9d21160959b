// Counters that are mirrored into words: every count reaches its word, in order, and none after the set's release.

#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "engine/counter_sets.h"
#include "lane/host_completion_word.h"
#include "tests/domain_test_support.h"
#include "tests/nics.h"
#include "tests/rig.h"

namespace kvc::test::mirrored_counters {
namespace {

using Words = std::vector<std::shared_ptr<CompletionWord>>;

// Keeps all stored values. Fails once `room` values were stored.
struct RecordingWord final : CompletionWord {
  explicit RecordingWord(size_t room = SIZE_MAX) : room(room) {}
  Status store(uint64_t value) noexcept override {
    if (stored.size() == room) return Error{ErrorCode::kSystem, "word", {}, "store", "the word is gone"};
    stored.push_back(value);
    return {};
  }
  size_t room;
  std::vector<uint64_t> stored;
};

// Counts as the transfer thread does.
std::optional<CounterSets::Fired> count(CounterSets& counters, uint32_t immediate) {
  const ImmCounterTable::Added added = counters.add(immediate, 1);
  return added.reached ? counters.reached(added.owner) : std::nullopt;
}

TEST(MirroredCounters, EachWordHasItsCounterFromTheCallOn) {
  ManualControl control;
  CounterSets counters;
  const CounterSet set = must(counters.allocate(2, {}));
  count(counters, Immediate::with_multiplicity(set.immediates[1], 5));
  const auto first = std::make_shared<RecordingWord>();
  const auto second = std::make_shared<RecordingWord>();
  EXPECT_FALSE(counters.acted_on(set.immediates[0]));
  must(counters.mirror(set.id, {first, second}, control));
  EXPECT_TRUE(counters.acted_on(set.immediates[0])) << "pages may be used because of any count";
  EXPECT_FALSE(count(counters, set.immediates[0]).has_value());
  EXPECT_FALSE(count(counters, Immediate::with_multiplicity(set.immediates[1], 3)).has_value());
  EXPECT_FALSE(count(counters, set.immediates[0]).has_value());
  EXPECT_EQ(first->stored, (std::vector<uint64_t>{0, 1, 2}));
  EXPECT_EQ(second->stored, (std::vector<uint64_t>{5, 8}));
  must(counters.release(set.id));
  count(counters, set.immediates[0]);
  EXPECT_EQ(first->stored.back(), 2U);
  control.work();
  EXPECT_EQ(first.use_count(), 1) << "the set no longer shares the word";
}

TEST(MirroredCounters, RefuseWhatCannotBe) {
  ManualControl control;
  CounterSets counters;
  const CounterSet set = must(counters.allocate(2, {}));
  const auto word = std::make_shared<HostCompletionWord>();
  const auto expect_refused = [](const Status& status, const std::string& words) {
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().to_string();
  };
  expect_refused(counters.mirror(set.id, {word}, control), "1 words for 2 counters");
  expect_refused(counters.mirror(set.id, {word, nullptr}, control), "a word is missing");
  expect_refused(counters.mirror(set.id + 1, {word, word}, control), "does not exist");
  ASSERT_TRUE(counters.expect(set.id, {1, 0}, {}, nullptr, 0, control).ok());
  expect_refused(counters.mirror(set.id, {word, word}, control), "has not reached its targets");
  ASSERT_TRUE(count(counters, set.immediates[0]).has_value());
  must(counters.mirror(set.id, {word, std::make_shared<HostCompletionWord>()}, control));
  expect_refused(counters.mirror(set.id, {word, word}, control), "mirrored already");
  const auto target = counters.expect(set.id, {2, 2}, {}, nullptr, 0, control);
  ASSERT_FALSE(target.ok());
  EXPECT_NE(target.error().message.find("is mirrored"), std::string::npos);
}

TEST(MirroredCounters, AFailingWordEndsTheMirrorWithOneEvent) {
  ManualControl control;
  CounterSets counters;
  const CounterSet set = must(counters.allocate(2, {}));
  const auto good = std::make_shared<RecordingWord>();
  must(counters.mirror(set.id, {good, std::make_shared<RecordingWord>(1)}, control));
  const auto fired = count(counters, set.immediates[1]);
  ASSERT_TRUE(fired.has_value());
  EXPECT_EQ(fired->error->message, "the word is gone");
  for (const uint32_t immediate : set.immediates) EXPECT_FALSE(count(counters, immediate).has_value());
  EXPECT_EQ(good->stored, (std::vector<uint64_t>{0}));
  EXPECT_FALSE(counters.expect(set.id, {9, 9}, {}, nullptr, 0, control).ok());

  const CounterSet never = must(counters.allocate(1, {}));
  EXPECT_FALSE(counters.mirror(never.id, {std::make_shared<RecordingWord>(0)}, control).ok());
}

// Several threads count, as the threads of several domains may. A lost store would leave a word behind its counter.
TEST(MirroredCounters, NoCountIsLostBetweenThreads) {
  ManualControl control;
  CounterSets counters;
  const CounterSet set = must(counters.allocate(2, {}));
  std::array<std::shared_ptr<HostCompletionWord>, 2> words{std::make_shared<HostCompletionWord>(),
                                                           std::make_shared<HostCompletionWord>()};
  constexpr uint64_t kEach = 2000;
  std::atomic<bool> fell{false};
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&] {
      for (uint64_t i = 0; i < kEach; ++i) count(counters, set.immediates[i % 2]);
    });
  }
  std::thread poller([&] {
    uint64_t last = 0;
    while (!done) {
      const uint64_t now = words[0]->load();
      if (now < last) fell = true;
      last = now;
    }
  });
  must(counters.mirror(set.id, {words[0], words[1]}, control));
  for (std::thread& thread : threads) thread.join();
  for (const auto& word : words) EXPECT_EQ(word->load(), 3 * kEach / 2);
  done = true;
  poller.join();
  EXPECT_FALSE(fell);
}

class MirroredLanes : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Lanes, MirroredLanes, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

TEST_P(MirroredLanes, APollerOfTheWordSeesThePage) {
  constexpr size_t kPage = 4096;
  Pair pair(GetParam(), 64 * kPage);
  const CounterSet set = must(pair.receiver.engine->alloc_counters(1));
  const auto word = std::make_shared<HostCompletionWord>();
  must(pair.receiver.engine->mirror_counters(set.id, {word}));
  for (uint64_t page = 0; page < 32; ++page) {
    fill_random(pair.sender.data() + page * kPage, kPage, page);
    must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, page * kPage, pair.receiver_region,
                                       page * kPage, kPage, set.immediates[0]));
    await([&] { return word->load() == page + 1; }, "the word");
    ASSERT_EQ(std::memcmp(pair.receiver.data() + page * kPage, pair.sender.data() + page * kPage, kPage), 0);
  }
  must(pair.receiver.engine->release_counters(set.id));
}

TEST(MirroredEngine, AFailingWordIsReportedAsAnEventOfTheSet) {
  Pair pair("sim", 4096);
  const CounterSet set = must(pair.receiver.engine->alloc_counters(1));
  must(pair.receiver.engine->mirror_counters(set.id, {std::make_shared<RecordingWord>(1)}));
  must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64,
                                     set.immediates[0]));
  const Event event = must(pair.receiver.engine->wait_counters(set.id, kLimit));
  EXPECT_EQ(event.kind, EventKind::kCountersReached);
  ASSERT_TRUE(event.error.has_value());
  EXPECT_EQ(event.error->message, "the word is gone");
}

}  // namespace
}  // namespace kvc::test::mirrored_counters
