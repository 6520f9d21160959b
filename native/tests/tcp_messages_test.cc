// Immediates without pages, and messages, over the tcp provider. tcp_hostile_test.cc tests the same with raw sockets.
#include "tcp_test_support.h"

namespace kvc::tcp {
namespace {

TEST(TcpMessages, AnImmediateAloneNeedsNoKey) {
  Pair pair;
  pair.connect();
  post(pair.a, kLinkOfA, pair.b, {.work = 1, .page_bytes = 0, .from = {0, 0, 0}, .to = {0, 0, 0}, .rkey = 0});
  post(pair.a, kLinkOfA, pair.b, {.work = 2, .from = {0}, .to = {0}});
  pair.run_until([&] { return pair.a.record().succeeded(1) && pair.a.record().succeeded(2); });
  EXPECT_EQ(pair.b.record().counted, 4U);
  EXPECT_EQ(pair.b.record().immediate_links, (std::vector<LinkId>{kLinkOfB, kLinkOfB}));
}

Bytes message_of(size_t bytes, int seed) { return Bytes(bytes, static_cast<std::byte>(seed)); }

TEST(TcpMessages, MessagesArriveWholeBothWaysAndCompleteOnceTaken) {
  Pair pair;
  EXPECT_EQ(pair.a.domain->send(kLinkOfA, 1, message_of(1, 1)), Posted::kYes);  // the link does not exist yet
  EXPECT_EQ(pair.a.record().completed.at(1)->code, ErrorCode::kPeerDown);
  pair.connect();
  WorkId work = 10;
  for (const size_t bytes : {size_t{1}, size_t{100}, kMaxMessageBytes - 1, kMaxMessageBytes}) {
    EXPECT_EQ(pair.a.domain->send(kLinkOfA, work, message_of(bytes, 3)), Posted::kYes);
    EXPECT_EQ(pair.b.domain->send(kLinkOfB, work, message_of(bytes, 4)), Posted::kYes);
    pair.run_until([&] { return pair.a.record().succeeded(work) && pair.b.record().succeeded(work); });
    EXPECT_TRUE(pair.b.record().messages.back() == std::pair(kLinkOfB, message_of(bytes, 3)));
    EXPECT_TRUE(pair.a.record().messages.back() == std::pair(kLinkOfA, message_of(bytes, 4)));
    ++work;
  }
}

class TcpMessageSlots : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Connections, TcpMessageSlots, testing::Values(1, 2));

TEST_P(TcpMessageSlots, MessagesThatAreNotTakenHoldTheirSenderBackAndNoWrite) {
  Pair pair({}, GetParam());
  pair.connect();
  pair.b.record().message_room = 0;
  WorkId work = 0;
  while (pair.a.domain->send(kLinkOfA, work + 1, message_of(4096, 1)) == Posted::kYes) ++work;
  EXPECT_EQ(work, kMessageSlots);
  post(pair.a, kLinkOfA, pair.b, {.work = 100, .from = {0}, .to = {0}});
  post(pair.b, kLinkOfB, pair.a, {.work = 100, .from = {0}, .to = {0}});
  pair.run_until([&] { return pair.a.record().succeeded(100) && pair.b.record().succeeded(100); });
  EXPECT_EQ(pair.a.record().completed.size(), 1U);
  // Messages are taken while the sink has room, and taken messages make room for new ones.
  pair.b.record().message_room = 3;
  pair.run_until([&] { return pair.a.record().completed.size() == 4; });
  for (WorkId more = 200; more < 203; ++more) {
    EXPECT_EQ(pair.a.domain->send(kLinkOfA, more, message_of(1, 2)), Posted::kYes);
  }
  EXPECT_EQ(pair.a.domain->send(kLinkOfA, 203, message_of(1, 2)), Posted::kBusy);
  pair.b.record().message_room = SIZE_MAX;
  pair.run_until([&] { return pair.a.record().completed.size() == 1 + kMessageSlots + 3; });
  EXPECT_EQ(pair.b.record().messages.size(), kMessageSlots + 3);
}

TEST(TcpMessages, AFencedLinkEndsItsMessages) {
  Pair pair;
  pair.connect();
  pair.b.record().message_room = 0;
  for (WorkId work = 1; work <= 3; ++work) pair.a.domain->send(kLinkOfA, work, message_of(10, 1));
  run_idle(pair.both());
  EXPECT_TRUE(pair.b.domain->fence(kLinkOfB));
  pair.b.record().message_room = SIZE_MAX;
  pair.run_until([&] { return !pair.a.record().down.empty(); });
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
  ASSERT_EQ(pair.a.record().completed.size(), 3U);
  for (const auto& [work, error] : pair.a.record().completed) EXPECT_EQ(error->code, ErrorCode::kPeerDown);
}

}  // namespace
}  // namespace kvc::tcp
