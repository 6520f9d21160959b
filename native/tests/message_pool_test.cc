// The pool of received messages alone: its limits, and when it requests a wake-up of the transfer thread.

#include "engine/message_pool.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <thread>

namespace kvc {
namespace {

class Pool : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(pool.open().ok()); }
  bool put(PeerId peer) { return pool.put(peer, Bytes(1, static_cast<std::byte>(peer))); }
  // Takes one message. Returns true if the transfer thread is to be woken.
  bool take() {
    bool wake = false;
    EXPECT_EQ(pool.take(1, wake).size(), 1U);
    return wake;
  }
  MessagePool pool;
};

TEST_F(Pool, HasRoomForSoManyInAllAndAQuarterForOnePeer) {
  for (size_t i = 0; i < MessagePool::kRoomOfOne; ++i) ASSERT_TRUE(put(1));
  EXPECT_FALSE(put(1));
  for (PeerId peer = 2; peer <= 4; ++peer) {
    for (size_t i = 0; i < MessagePool::kRoomOfOne; ++i) ASSERT_TRUE(put(peer));
  }
  EXPECT_FALSE(put(5)) << "the pool is full, whoever it is";
  bool wake = false;
  const std::vector<Message> all = pool.take(SIZE_MAX, wake);
  EXPECT_EQ(all.size(), MessagePool::kRoom);
  EXPECT_EQ(all.front().peer, 1U);
  EXPECT_EQ(all.back().peer, 4U);
  EXPECT_TRUE(wake);
}

TEST_F(Pool, RequestsTheWorkerOnlyWhereAMessageWasRefused) {
  EXPECT_TRUE(put(1));
  EXPECT_FALSE(take());
  EXPECT_FALSE(pool.room_again());
  while (put(1)) {
  }
  EXPECT_FALSE(pool.room_again()) << "nothing was taken yet";
  EXPECT_TRUE(take());
  EXPECT_TRUE(take()) << "until the worker has looked";
  EXPECT_TRUE(pool.room_again());
  EXPECT_FALSE(pool.room_again());
  EXPECT_FALSE(take());
}

TEST_F(Pool, AWaitEndsWithAMessageOrItsTime) {
  bool wake = false;
  EXPECT_EQ(pool.wait(Timeout(1000), wake).error().code, ErrorCode::kTimeout);
  std::thread putting([this] { put(7); });
  const Result<Message> message = pool.wait(std::chrono::seconds(30), wake);
  putting.join();
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(message.value().peer, 7U);
}

TEST_F(Pool, TheDescriptorFollowsIt) {
  pollfd fd{pool.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&fd, 1, 0), 0);
  put(1);
  put(1);
  EXPECT_EQ(::poll(&fd, 1, 0), 1);
  take();
  EXPECT_EQ(::poll(&fd, 1, 0), 1);
  take();
  EXPECT_EQ(::poll(&fd, 1, 0), 0);
}

}  // namespace
}  // namespace kvc
