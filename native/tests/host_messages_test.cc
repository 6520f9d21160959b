// Immediates without pages, and messages, over the host provider: two domains of one process, and a peer that corrupts
// memory.
#include "host_test_support.h"

namespace kvc::host {
namespace {

TEST(HostMessages, AnImmediateAloneNeedsNoKey) {
  Pair pair;
  pair.connect();
  post(pair.a, kLinkOfA, 0, {.work = 1, .page_bytes = 0, .pages = {{0, 0}, {0, 0}, {0, 0}}});
  run_until(pair.both(), [&] { return pair.b.record().counted == 3; }, "the immediate");
  EXPECT_TRUE(pair.a.record().succeeded(1));
  EXPECT_EQ(pair.b.record().immediate_links, std::vector<LinkId>{kLinkOfB});
}

Bytes message_of(size_t bytes, int seed) { return Bytes(bytes, static_cast<std::byte>(seed)); }

TEST(HostMessages, MessagesArriveWholeBothWaysAndCompleteOnceTaken) {
  Pair pair;
  EXPECT_EQ(pair.a.domain->send(kLinkOfA, 1, message_of(1, 1)), Posted::kYes);  // the link does not exist yet
  EXPECT_EQ(pair.a.record().failure(1), ErrorCode::kPeerDown);
  pair.connect();
  WorkId work = 10;
  for (const size_t bytes : {size_t{1}, size_t{100}, kMaxMessageBytes - 1, kMaxMessageBytes}) {
    EXPECT_EQ(pair.a.domain->send(kLinkOfA, work, message_of(bytes, 3)), Posted::kYes);
    EXPECT_EQ(pair.b.domain->send(kLinkOfB, work, message_of(bytes, 4)), Posted::kYes);
    run_until(
        pair.both(), [&] { return pair.a.record().succeeded(work) && pair.b.record().succeeded(work); },
        "both messages");
    EXPECT_TRUE(pair.b.record().messages.back() == std::pair(kLinkOfB, message_of(bytes, 3)));
    EXPECT_TRUE(pair.a.record().messages.back() == std::pair(kLinkOfA, message_of(bytes, 4)));
    ++work;
  }
}

TEST(HostMessages, MessagesThatAreNotTakenHoldTheirSenderBackAndNoWrite) {
  Pair pair;
  pair.connect();
  pair.b.domain->record.message_room = 0;
  size_t arrived = 0;
  pair.b.domain->on_completion = [&](const Completion& completion) {
    if (completion.kind == Completion::Kind::kMessage) ++arrived;
  };
  WorkId work = 0;
  while (pair.a.domain->send(kLinkOfA, work + 1, message_of(4096, 1)) == Posted::kYes) ++work;
  EXPECT_EQ(work, kMessageSlots);
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = 100});
  run_until(pair.both(), [&] { return pair.b.record().counted == 1; }, "the write");
  run_idle(pair.both());
  EXPECT_EQ(pair.a.record().completed.size(), 1U);
  EXPECT_EQ(arrived, kMessageSlots) << "each message once, taken or not";
  EXPECT_TRUE(pair.b.domain->prepare_sleep()) << "unread messages keep nobody awake";
  // Messages are taken while the sink has room, and taken messages make room for new ones.
  pair.b.domain->record.message_room = 3;
  run_until(pair.both(), [&] { return pair.a.record().completed.size() == 4; }, "three messages");
  for (WorkId more = 200; more < 203; ++more) {
    EXPECT_EQ(pair.a.domain->send(kLinkOfA, more, message_of(1, 2)), Posted::kYes);
  }
  EXPECT_EQ(pair.a.domain->send(kLinkOfA, 203, message_of(1, 2)), Posted::kBusy);
  pair.b.domain->record.message_room = SIZE_MAX;
  run_until(pair.both(), [&] { return pair.a.record().completed.size() == 1 + kMessageSlots + 3; }, "all messages");
  EXPECT_EQ(pair.b.record().messages.size(), kMessageSlots + 3);
}

TEST(HostMessages, AMessageWakesASleepingPeerAndItsTakingTheSender) {
  Pair pair;
  pair.connect();
  ASSERT_TRUE(pair.b.domain->prepare_sleep());
  pair.a.domain->send(kLinkOfA, 1, message_of(10, 1));
  pair.a.domain->poll();
  ASSERT_TRUE(pair.a.domain->prepare_sleep());
  pollfd b{pair.b.domain->domain().fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&b, 1, 10'000), 1);
  run_until({pair.b.domain.get()}, [&] { return pair.b.record().messages.size() == 1; }, "the message");
  EXPECT_FALSE(pair.b.domain->prepare_sleep()) << "the sender does not know yet";
  run_idle({pair.b.domain.get()});
  pollfd a{pair.a.domain->domain().fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&a, 1, 10'000), 1);
  run_until({pair.a.domain.get()}, [&] { return pair.a.record().succeeded(1); }, "its completion");
}

TEST(HostMessages, AMessageThatLiesAboutItsLengthCostsTheLink) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{kMaxMessageBytes + 1}, UINT64_MAX}) {
    Pair pair;
    pair.connect();
    Channel& to_b = only_segment().to_acceptor;
    to_b.messages[3].bytes.store(bytes);
    to_b.messages_put.store(1 << 3);
    run_until(pair.both(), [&] { return pair.b.record().down.size() == 1; }, "the end of the link");
    EXPECT_TRUE(pair.b.record().messages.empty());
  }
}

TEST(HostMessages, ASlotThatIsUsedAgainBeforeItWasTakenCostsTheLink) {
  Pair pair;
  pair.connect();
  pair.b.domain->record.message_room = 0;
  pair.a.domain->send(kLinkOfA, 1, message_of(10, 1));
  run_idle(pair.both());
  EXPECT_TRUE(pair.b.record().down.empty());
  only_segment().to_acceptor.messages_put.fetch_xor(1);
  run_until(pair.both(), [&] { return pair.b.record().down.size() == 1; }, "the end of the link");
}

TEST(HostMessages, ATakenWordOfAnySortEndsNoMessageTwice) {
  Pair pair;
  pair.connect();
  Channel& to_b = only_segment().to_acceptor;
  for (WorkId work = 1; work <= 100; ++work) {
    to_b.messages_taken.store(work * 0x9E3779B97F4A7C15ULL);
    pair.a.domain->send(kLinkOfA, work, message_of(10, 1));
    run_idle(pair.both());
  }
  pair.b.domain->fence(kLinkOfB);
  run_until(pair.both(), [&] { return !pair.a.record().down.empty(); }, "the end");
  EXPECT_LE(pair.a.record().completed.size(), 100U);  // the sink itself checks that none ends twice
}

TEST(HostMessages, AFencedLinkEndsItsMessages) {
  Pair pair;
  pair.connect();
  pair.b.domain->record.message_room = 1;
  for (WorkId work = 1; work <= 3; ++work) pair.a.domain->send(kLinkOfA, work, message_of(10, 1));
  run_until({pair.b.domain.get()}, [&] { return pair.b.record().messages.size() == 1; }, "the one that is taken");
  EXPECT_TRUE(pair.b.domain->fence(kLinkOfB));
  run_until({pair.a.domain.get()}, [&] { return pair.a.record().completed.size() == 3; }, "their ends");
  EXPECT_TRUE(pair.a.record().succeeded(1));
  for (WorkId work = 2; work <= 3; ++work) EXPECT_EQ(pair.a.record().failure(work), ErrorCode::kPeerDown);
  pair.b.domain->record.message_room = SIZE_MAX;
  run_idle(pair.both());
  EXPECT_EQ(pair.b.record().messages.size(), 3U) << "taken too late, which tells nobody";
  EXPECT_EQ(pair.a.record().completed.size(), 3U);
}

// Messages of a peer that ends right after sending them still arrive.
TEST(HostMessages, WhatAPeerHasSentBeforeItsEndArrives) {
  Pair pair;
  pair.connect();
  pair.a.domain->send(kLinkOfA, 1, message_of(10, 1));
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
  post(pair.b, kLinkOfB, pair.a.rkey, {.work = 1});  // finds the end of the peer before the messages are read
  EXPECT_EQ(pair.b.record().down.size(), 1U);
  EXPECT_EQ(pair.b.record().messages.size(), 1U);
}

// Failover relies on this: a batch that completed here was counted there, however soon the peer fenced the link.
TEST(HostMessages, WhatCompletedBeforeAFenceIsCounted) {
  Pair pair;
  pair.connect();
  for (WorkId work = 1; work <= 10; ++work) post(pair.a, kLinkOfA, pair.b.rkey, {.work = work});
  EXPECT_EQ(pair.a.record().completed.size(), 10U);
  EXPECT_TRUE(pair.b.domain->fence(kLinkOfB));
  EXPECT_EQ(pair.b.record().counted, 10U);
}

}  // namespace
}  // namespace kvc::host
