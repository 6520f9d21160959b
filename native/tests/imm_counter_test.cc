#include "engine/imm_counter.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

namespace kvc {
namespace {

constexpr PeerId kPeer = 7;

uint32_t allocate_one(ImmCounterTable& table, uint64_t owner = 1) {
  std::vector<uint32_t> immediates;
  EXPECT_TRUE(table.allocate(1, owner, {}, immediates));
  return immediates.at(0);
}

TEST(ImmCounter, CountsByMultiplicity) {
  ImmCounterTable table;
  const uint32_t immediate = allocate_one(table);
  EXPECT_EQ(table.value(immediate), 0U);
  EXPECT_FALSE(table.add(immediate, kPeer).stale);
  EXPECT_FALSE(table.add(Immediate::with_multiplicity(immediate, 64), kPeer).stale);
  EXPECT_EQ(table.value(immediate), 65U);
}

TEST(ImmCounter, AnImmediateOfNoCounterIsStale) {
  ImmCounterTable table;
  EXPECT_TRUE(table.add(0, kPeer).stale);           // nothing is allocated
  EXPECT_TRUE(table.add(UINT32_MAX, kPeer).stale);  // a chunk without memory
  const uint32_t immediate = allocate_one(table);
  Immediate other = Immediate::decode(immediate);
  other.generation += 1;
  EXPECT_TRUE(table.add(other.encode(), kPeer).stale);
  other = Immediate::decode(immediate);
  other.slot += 1;
  EXPECT_TRUE(table.add(other.encode(), kPeer).stale);
  EXPECT_EQ(table.value(immediate), 0U);
}

TEST(ImmCounter, AReleasedImmediateStaysStaleForTheNextOwner) {
  ImmCounterTable table;
  std::vector<uint32_t> all;
  ASSERT_TRUE(table.allocate(ImmCounterTable::kSlots, 1, {}, all));
  const uint32_t old = all[77];
  table.add(old, kPeer);
  table.release(old);
  EXPECT_TRUE(table.add(old, kPeer).stale);
  EXPECT_EQ(table.value(old), std::nullopt);
  const uint32_t fresh = allocate_one(table, 2);  // the only free slot
  EXPECT_EQ(Immediate::decode(fresh).slot, Immediate::decode(old).slot);
  EXPECT_TRUE(table.add(old, kPeer).stale);
  EXPECT_EQ(table.value(fresh), 0U);  // no count of the old owner
  table.release(old);                 // a second release of the old one does nothing
  EXPECT_FALSE(table.add(fresh, kPeer).stale);
}

TEST(ImmCounter, AllocationIsAllOrNothingAndBounded) {
  ImmCounterTable table;
  std::vector<uint32_t> most;
  ASSERT_TRUE(table.allocate(ImmCounterTable::kSlots - 1, 1, {}, most));
  EXPECT_EQ(std::set<uint32_t>(most.begin(), most.end()).size(), most.size());
  std::vector<uint32_t> none;
  EXPECT_FALSE(table.allocate(2, 1, {}, none));
  EXPECT_TRUE(none.empty());
  EXPECT_EQ(table.allocated(), ImmCounterTable::kSlots - 1);
  EXPECT_TRUE(table.allocate(1, 1, {}, none));
  for (const uint32_t immediate : most) table.release(immediate);
  EXPECT_EQ(table.allocated(), 1U);
}

TEST(ImmCounter, SlotsAreReusedInTheOrderOfTheirRelease) {
  ImmCounterTable table;
  std::vector<uint32_t> all;
  ASSERT_TRUE(table.allocate(ImmCounterTable::kSlots, 1, {}, all));
  for (const size_t i : {500, 3, 60000}) table.release(all[i]);
  for (const uint32_t slot : {500U, 3U, 60000U}) EXPECT_EQ(Immediate::decode(allocate_one(table)).slot, slot);
}

TEST(ImmCounter, GenerationsWrapAfterAllOfThem) {
  ImmCounterTable table;
  std::vector<uint32_t> all;
  ASSERT_TRUE(table.allocate(ImmCounterTable::kSlots, 1, {}, all));
  const uint32_t first = all[0];
  std::set<uint32_t> seen;
  uint32_t immediate = first;
  for (uint32_t i = 0; i < 1U << Immediate::kGenerationBits; ++i) {
    EXPECT_TRUE(seen.insert(immediate).second);
    table.release(immediate);
    immediate = allocate_one(table);
  }
  EXPECT_EQ(immediate, first);
}

TEST(ImmCounter, TheTargetIsReportedOnceByTheRaiseThatReachesIt) {
  ImmCounterTable table;
  const uint32_t after = allocate_one(table, 11);
  EXPECT_FALSE(table.expect(after, 2));
  EXPECT_FALSE(table.add(after, kPeer).reached);
  const ImmCounterTable::Added reached = table.add(after, kPeer);
  EXPECT_TRUE(reached.reached);
  EXPECT_EQ(reached.owner, 11U);
  EXPECT_FALSE(table.add(after, kPeer).reached);

  const uint32_t before = allocate_one(table, 12);
  table.add(before, kPeer);
  table.add(before, kPeer);
  EXPECT_TRUE(table.expect(before, 2));
  EXPECT_FALSE(table.add(before, kPeer).reached);

  const uint32_t zero = allocate_one(table, 13);
  EXPECT_TRUE(table.expect(zero, 0));
}

// Threads add, expect, release and allocate on the same slots. Every target is reported exactly once, no count is lost,
// and no count passes to another generation.
TEST(ImmCounter, HammeredByManyThreadsItReportsEachTargetOnce) {
  constexpr uint32_t kAdders = 4;
  constexpr uint64_t kPerAdder = 200;
  constexpr int kRounds = 300;
  ImmCounterTable table;
  std::vector<uint32_t> filler;  // leaves one slot, so that every round reuses it
  ASSERT_TRUE(table.allocate(ImmCounterTable::kSlots - 1, 0, {}, filler));
  std::atomic<uint32_t> current{0};
  std::atomic<int> round{-1};
  std::atomic<uint32_t> finished{0};
  std::atomic<uint32_t> reports{0};
  std::atomic<uint32_t> wrong_owner{0};
  std::atomic<uint32_t> stale_hits{0};
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < kAdders; ++i) {
    threads.emplace_back([&] {
      uint32_t previous = 0;
      for (int r = 0; r < kRounds; ++r) {
        while (round.load() < r) std::this_thread::yield();
        const uint32_t immediate = current.load();
        for (uint64_t n = 0; n < kPerAdder; ++n) {
          const ImmCounterTable::Added added = table.add(immediate, kPeer);
          if (added.reached) {
            ++reports;
            if (added.owner != static_cast<uint64_t>(r) + 1) ++wrong_owner;
          }
          if (r > 0 && n % 16 == 0 && !table.add(previous, kPeer).stale) ++stale_hits;
        }
        previous = immediate;
        ++finished;
      }
    });
  }
  for (int r = 0; r < kRounds; ++r) {
    const uint32_t immediate = allocate_one(table, static_cast<uint64_t>(r) + 1);
    current = immediate;
    round = r;
    // Races with the adders: sometimes before, sometimes after all adds.
    if (r % 2 == 0) std::this_thread::yield();
    if (table.expect(immediate, kAdders * kPerAdder)) ++reports;
    while (finished.load() < kAdders * static_cast<uint32_t>(r + 1)) std::this_thread::yield();
    ASSERT_EQ(reports.load(), static_cast<uint32_t>(r) + 1);
    ASSERT_EQ(table.value(immediate), kAdders * kPerAdder);
    table.release(immediate);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong_owner.load(), 0U);
  EXPECT_EQ(stale_hits.load(), 0U);
}

// The same without a barrier between rounds: adders keep raising the current immediate while it is released and
// allocated again.
TEST(ImmCounter, ReleaseUnderFireNeverCreditsTheNextOwner) {
  ImmCounterTable table;
  std::vector<uint32_t> filler;
  ASSERT_TRUE(table.allocate(ImmCounterTable::kSlots - 1, 0, {}, filler));
  std::atomic<uint32_t> current{allocate_one(table, 1)};
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> alien{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!stop.load(std::memory_order_relaxed)) {
        const uint32_t immediate = current.load();
        const ImmCounterTable::Added added = table.add(immediate, kPeer);
        // Owners are numbered like generations: a report must name the owner of the immediate that was added.
        if (added.reached && added.owner % 1024 != (Immediate::decode(immediate).generation + 1) % 1024) ++alien;
      }
    });
  }
  for (uint64_t owner = 2; owner < 3000; ++owner) {
    const uint32_t immediate = current.load();
    table.expect(immediate, 1 + owner % 7);
    if (owner % 3 == 0) std::this_thread::yield();
    table.release(immediate);
    current = allocate_one(table, owner);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(alien.load(), 0U);
}

TEST(ImmCounter, APeerWithoutTheCounterRaisesNothing) {
  ImmCounterTable table;
  std::vector<uint32_t> immediates;
  const std::vector<PeerId> one{kPeer};
  const std::vector<PeerId> several{kPeer, 9, 12};
  ASSERT_TRUE(table.allocate(1, 1, {}, immediates));
  ASSERT_TRUE(table.allocate(1, 2, one, immediates));
  ASSERT_TRUE(table.allocate(1, 3, several, immediates));
  EXPECT_FALSE(table.add(immediates[0], 8).foreign);
  EXPECT_TRUE(table.add(immediates[1], 8).foreign);
  EXPECT_TRUE(table.add(immediates[1], 0).foreign);
  EXPECT_FALSE(table.add(immediates[1], kPeer).foreign);
  EXPECT_TRUE(table.add(immediates[2], 8).foreign);
  EXPECT_FALSE(table.add(immediates[2], 12).foreign);
  EXPECT_EQ(table.value(immediates[0]), 1U);
  EXPECT_EQ(table.value(immediates[1]), 1U);
  EXPECT_EQ(table.value(immediates[2]), 1U);
  // The raisers of a released counter are not checked.
  table.release(immediates[1]);
  EXPECT_FALSE(table.add(immediates[1], 8).foreign);
  EXPECT_TRUE(table.add(immediates[1], 8).stale);
}

// The slot changes owner while late immediates of the previous owner's raiser arrive. Those are stale and never
// foreign, because foreign ones would cost an honest peer its link.
TEST(ImmCounter, ALateImmediateIsStaleAndNotForeign) {
  ImmCounterTable table;
  std::vector<uint32_t> all;
  ASSERT_TRUE(table.allocate(ImmCounterTable::kSlots, 1, {kPeer}, all));  // so that one slot changes owner repeatedly
  std::atomic<uint32_t> current{all[5]};
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> foreign{0};
  std::thread raiser([&] {
    while (!stop.load()) {
      const uint32_t immediate = current.load();
      foreign += table.add(immediate, kPeer).foreign ? 1 : 0;
    }
  });
  const std::vector<PeerId> mine{kPeer};
  const std::vector<PeerId> others{kPeer + 1};
  for (int round = 0; round < 20000; ++round) {
    // The owner stops giving it out, then releases it. The next owner's raiser is another peer.
    const uint32_t old = current.load();
    table.release(old);
    std::vector<uint32_t> next;
    ASSERT_TRUE(table.allocate(1, 2, others, next));
    table.release(next[0]);
    next.clear();
    ASSERT_TRUE(table.allocate(1, 3, mine, next));
    current.store(next[0]);
  }
  stop.store(true);
  raiser.join();
  EXPECT_EQ(foreign.load(), 0U);
}

// Targets are cumulative: each one is reached once, whichever call comes first.
TEST(ImmCounter, TargetsFollowEachOther) {
  ImmCounterTable table;
  const uint32_t immediate = allocate_one(table);
  EXPECT_FALSE(table.expect(immediate, 2));
  EXPECT_FALSE(table.add(immediate, kPeer).reached);
  EXPECT_TRUE(table.add(immediate, kPeer).reached);
  EXPECT_FALSE(table.add(immediate, kPeer).reached);
  EXPECT_TRUE(table.expect(immediate, 3));  // reached already
  EXPECT_FALSE(table.expect(immediate, 4));
  EXPECT_TRUE(table.add(immediate, kPeer).reached);
}

}  // namespace
}  // namespace kvc
