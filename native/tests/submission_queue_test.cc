#include "base/submission_queue.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace kvc {
namespace {

struct Node {
  int thread = 0;
  int number = 0;
  Node* next = nullptr;
};

TEST(SubmissionQueue, ADrainTakesEverythingInOrder) {
  SubmissionQueue<Node> queue;
  EXPECT_TRUE(queue.empty());
  EXPECT_FALSE(queue.drain([](std::unique_ptr<Node>) { FAIL(); }));
  for (int i = 0; i < 5; ++i) queue.push(std::make_unique<Node>(Node{0, i, nullptr}));
  EXPECT_FALSE(queue.empty());
  std::vector<int> taken;
  EXPECT_TRUE(queue.drain([&](std::unique_ptr<Node> node) { taken.push_back(node->number); }));
  EXPECT_EQ(taken, (std::vector<int>{0, 1, 2, 3, 4}));
  EXPECT_TRUE(queue.empty());
}

TEST(SubmissionQueue, WhatIsLeftIsFreedWithIt) {
  SubmissionQueue<Node> queue;  // the leak checker is the assertion
  queue.push(std::make_unique<Node>());
  EXPECT_FALSE(queue.empty());
}

TEST(SubmissionQueue, ANodePushedFromWithinADrainComesWithTheNext) {
  SubmissionQueue<Node> queue;
  queue.push(std::make_unique<Node>(Node{0, 1, nullptr}));
  std::vector<int> taken;
  const auto take = [&](std::unique_ptr<Node> node) {
    taken.push_back(node->number);
    if (node->number < 3) queue.push(std::make_unique<Node>(Node{0, node->number + 1, nullptr}));
  };
  while (queue.drain(take)) {
  }
  EXPECT_EQ(taken, (std::vector<int>{1, 2, 3}));
}

TEST(SubmissionQueue, EveryThreadsNodesArriveOnceAndInItsOrder) {
  constexpr int kThreads = 4;
  constexpr int kNodes = 20000;
  SubmissionQueue<Node> queue;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&queue, t] {
      for (int i = 0; i < kNodes; ++i) queue.push(std::make_unique<Node>(Node{t, i, nullptr}));
    });
  }
  std::vector<int> next(kThreads, 0);
  int total = 0;
  while (total < kThreads * kNodes) {
    const bool any = queue.drain([&](std::unique_ptr<Node> node) {
      ASSERT_EQ(node->number, next[static_cast<size_t>(node->thread)]++);
      ++total;
    });
    if (!any) std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(queue.empty());
}

}  // namespace
}  // namespace kvc
