// A NIC's interface goes down during a transfer that uses two NICs. Needs real NICs: KVC_TEST_DEVICES names two for
// each side, and KVC_TEST_LINK_DOWN and _UP are commands for the sender's first one (make test-verbs sets them).
#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "tests/rig.h"

namespace kvc::test::verbs_failover {
namespace {

constexpr uint64_t kPage = 64 << 10;
constexpr size_t kPages = 256;  // 16 MiB

PagedWrite all_pages(const Pair& pair, uint64_t seed, uint32_t immediate) {
  PagedWrite write;
  write.page_bytes = kPage;
  write.source = pair.sender.region;
  write.target = pair.receiver_region;
  write.source_pages = {shuffled(kPages, kPages, seed), kPage, 0};
  write.target_pages = write.source_pages;
  write.immediate = immediate;
  return write;
}

void run(const char* command) { ASSERT_EQ(std::system(command), 0) << command; }

TEST(VerbsFailover, ALinkTakenDownInMidTransferLosesNothing) {
  const char* const down = std::getenv("KVC_TEST_LINK_DOWN");
  const char* const up = std::getenv("KVC_TEST_LINK_UP");
  if (down == nullptr || up == nullptr) GTEST_SKIP() << "needs commands in KVC_TEST_LINK_DOWN and KVC_TEST_LINK_UP";
  constexpr size_t kRounds = 24;
  Pair pair(config("sender", "verbs", 2), config("receiver", "verbs", 2), kPages * kPage);
  fill_random(pair.sender.data(), kPages * kPage, 1);
  const auto [counters, immediate] = pair.counter(kRounds * kPages);
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  const auto write = [&, immediate = immediate](size_t first, size_t end) {
    for (size_t round = first; round < end; ++round) {
      must(pair.sender.engine->write_pages(transfer, all_pages(pair, round, immediate)));
    }
  };
  write(0, kRounds / 2);
  // A third of the transfer.
  while (must(pair.sender.engine->progress(transfer)).pages_done < kRounds * kPages / 3) std::this_thread::yield();
  run(down);
  // On a slow machine the command takes longer than the pages that are under way. These ones meet the link that is down.
  write(kRounds / 2, kRounds);
  must(pair.sender.engine->seal(transfer));
  const Event event = ended(*pair.sender.engine, transfer);
  run(up);
  EXPECT_EQ(event.kind, EventKind::kTransferDone) << (event.error ? event.error->to_string() : "");
  must(pair.receiver.engine->wait_counters(counters, kLimit));
  EXPECT_EQ(pair.count(counters), kRounds * kPages) << "each page counted once, though some were written twice";
  EXPECT_EQ(std::memcmp(pair.sender.data(), pair.receiver.data(), kPages * kPage), 0);
  EXPECT_GE(pair.sender.engine->stats().links_lost, 1U);
}

}  // namespace
}  // namespace kvc::test::verbs_failover
