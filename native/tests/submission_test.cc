// Writes are submitted without a reference to their objects: forgotten objects live until the writes were taken.

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "tests/rig.h"

namespace kvc::test::submission {
namespace {

constexpr size_t kBytes = 4096;

// Ends with the transfers whose callbacks hold it.
using Token = std::shared_ptr<int>;

void await_alone(const Token& token) {
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  while (token.use_count() > 1 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(token.use_count(), 1);
}

// All transfers to a peer that goes down end in one step. The callback of a transfer submits writes to other transfers
// that have not ended yet. These writes are taken after those transfers have ended.
TEST(Submission, WhatEndsBeforeItIsTakenIsStillThere) {
  constexpr size_t kTransfers = 8;
  Pair pair("sim", kBytes);
  const Token token = std::make_shared<int>(0);
  std::vector<TransferId> transfers;
  std::atomic<size_t> ended{0};
  std::atomic<size_t> submitted{0};
  for (size_t i = 0; i < kTransfers; ++i) {
    transfers.push_back(must(pair.sender.engine->open_transfer(pair.to_receiver, [&, token](const Event& event) {
      EXPECT_EQ(event.kind, EventKind::kTransferFailed);
      for (const TransferId other : transfers) {
        const Status status =
            pair.sender.engine->write(other, pair.sender.region, 0, pair.receiver_region, 0, 64, std::nullopt);
        if (status.ok()) ++submitted;
      }
      ++ended;
    })));
  }
  pair.receiver.engine.reset();
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  while (ended < kTransfers && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  ASSERT_EQ(ended, kTransfers);
  EXPECT_EQ(submitted, kTransfers * (kTransfers - 1) / 2);  // to those that had not ended
  await_alone(token);
  EXPECT_EQ(pair.sender.engine->stats().transfers_open, 0U);
}

// The same for all operations at once, for the sanitizers: regions and transfers are removed while other threads write.
TEST(Submission, WritingAndForgettingThreadsDoNotConflict) {
  constexpr int kRounds = 300;
  Pair pair("sim", kBytes);
  TransferEngine& engine = *pair.sender.engine;
  SharedMemory memory = must(SharedMemory::create("kvc-test-more", kBytes));
  std::atomic<TransferId> transfer{must(engine.open_transfer(pair.to_receiver))};
  std::atomic<RegionId> region{must(engine.register_memory(memory.data(), memory.size(), memory.fd(), 0))};
  std::atomic<bool> over{false};
  std::atomic<uint64_t> tried{0};
  std::atomic<uint64_t> written{0};
  std::vector<std::thread> writers;
  for (int i = 0; i < 2; ++i) {
    writers.emplace_back([&] {
      while (!over) {
        if (engine.write(transfer, region, 0, pair.receiver_region, 0, 64, std::nullopt).ok()) ++written;
        const Result<TransferId> one =
            engine.write_one(pair.to_receiver, region, 0, pair.receiver_region, 64, 64, std::nullopt);
        if (one.ok()) must(engine.wait_transfer(one.value(), kLimit));  // no faster than the transfer thread takes them
        ++tried;
      }
    });
  }
  for (int i = 0; i < kRounds; ++i) {
    const uint64_t before = tried;
    while (tried == before) std::this_thread::yield();
    const TransferId old_transfer = transfer.exchange(must(engine.open_transfer(pair.to_receiver)));
    (void)engine.cancel(old_transfer);  // it may have failed, with its source region
    const RegionId old_region =
        region.exchange(must(engine.register_memory(memory.data(), memory.size(), memory.fd(), 0)));
    must(engine.deregister_memory(old_region, kLimit));
  }
  over = true;
  for (std::thread& writer : writers) writer.join();
  EXPECT_GT(written, 0U);
  (void)engine.cancel(transfer);                      // it may have failed, with its source region
  must(engine.disconnect(pair.to_receiver, kLimit));  // every transfer has ended, and is gone
  EXPECT_EQ(engine.stats().transfers_open, 0U);
  EXPECT_EQ(engine.stats().regions, 2U);
}

}  // namespace
}  // namespace kvc::test::submission
