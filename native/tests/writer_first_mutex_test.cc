// Submissions read data that the transfer thread writes at the end of each transfer. However many there are, transfers
// end.

#include <thread>
#include <vector>

#include "tests/rig.h"

namespace kvc::test {
namespace {

TEST(WriterFirstMutex, ThreadsThatSubmitWithoutPauseKeepNoTransferFromEnding) {
  Pair pair("sim", 4096);
  TransferEngine& engine = *pair.sender.engine;
  const TransferId open = must(engine.open_transfer(pair.to_receiver));
  const auto limit = std::chrono::steady_clock::now() + kLimit;
  std::vector<std::jthread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&](const std::stop_token& stop) {
      // Looked up and refused, so that only the lock is kept busy, and no work accumulates.
      while (!stop.stop_requested() && std::chrono::steady_clock::now() < limit) {
        EXPECT_EQ(engine.write(open, pair.sender.region, 4096, pair.receiver_region, 0, 1, std::nullopt).error().code,
                  ErrorCode::kOutOfRange);
      }
    });
  }
  // Each waits until most of the nine threads have had their turn.
  for (int i = 0; i < 40; ++i) {
    const TransferId transfer =
        must(engine.write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64, std::nullopt));
    EXPECT_EQ(ended(engine, transfer).kind, EventKind::kTransferDone);
  }
  EXPECT_LT(std::chrono::steady_clock::now(), limit) << "they ended only when the others gave up";
}

}  // namespace
}  // namespace kvc::test
