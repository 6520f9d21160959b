#include "engine/command_pool.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "base/submission_queue.h"

namespace kvc {
namespace {

std::unique_ptr<Command> seal(CommandPool& pool, const std::shared_ptr<Transfer>& transfer) {
  std::unique_ptr<Command> command = pool.take();
  EXPECT_EQ(command->next, nullptr);
  EXPECT_TRUE(std::holds_alternative<std::monostate>(command->body));
  command->body.emplace<Seal>(Seal{transfer});
  return command;
}

std::shared_ptr<Transfer> some_transfer() {
  return std::make_shared<Transfer>(1, std::make_shared<Peer>(1, "peer"), EventCallback());
}

TEST(CommandPool, WhatWasGivenIsTakenAgainAndHoldsNothing) {
  CommandPool pool;
  const std::shared_ptr<Transfer> transfer = some_transfer();
  std::vector<std::unique_ptr<Command>> commands;
  std::set<const Command*> known;
  for (uint32_t i = 0; i < CommandPool::kLaidOut; ++i) known.insert(commands.emplace_back(seal(pool, transfer)).get());
  for (std::unique_ptr<Command>& command : commands) pool.give(std::move(command));
  EXPECT_EQ(transfer.use_count(), 1);  // released at once, not when the command is used again
  EXPECT_EQ(pool.size(), CommandPool::kLaidOut);
  std::set<const Command*> again;
  commands.clear();
  for (uint32_t i = 0; i < CommandPool::kLaidOut; ++i) again.insert(commands.emplace_back(pool.take()).get());
  EXPECT_EQ(again, known);
  commands.push_back(pool.take());
  EXPECT_EQ(known.count(commands.back().get()), 0U);
}

TEST(CommandPool, ABurstIsNotKept) {
  constexpr size_t kBurst = 10 * CommandPool::kKept;
  CommandPool pool;
  std::vector<std::unique_ptr<Command>> commands(kBurst);
  for (auto& command : commands) command = pool.take();
  for (auto& command : commands) pool.give(std::move(command));
  EXPECT_LE(pool.size(), 2 * CommandPool::kKept);
}

TEST(CommandPool, ThreadsThatTakeAtOnceNeverShareACommand) {
  constexpr int kThreads = 4;
  constexpr int kCommands = 20'000;
  CommandPool pool;
  SubmissionQueue<Command> queue;
  const std::shared_ptr<Transfer> transfer = some_transfer();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kCommands; ++i) queue.push(seal(pool, transfer));
    });
  }
  int carried_out = 0;
  while (carried_out < kThreads * kCommands) {
    const bool any = queue.drain([&](std::unique_ptr<Command> command) {
      ASSERT_EQ(std::get<Seal>(command->body).transfer, transfer);
      pool.give(std::move(command));
      ++carried_out;
    });
    if (!any) std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(transfer.use_count(), 1);
}

}  // namespace
}  // namespace kvc
