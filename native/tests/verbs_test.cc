// The verbs provider, domain against domain. Everywhere over a stand-in for libibverbs, and over real NICs if
// KVC_TEST_DEVICES names two (make test-verbs does, in a VM with software NICs).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "tests/verbs_test_support.h"

namespace kvc::verbs {
namespace {

// --- Behaviour on every NIC.

class VerbsDomains : public testing::TestWithParam<std::string> {
 protected:
  void open(const Tuning& tuning = {}) {
    if (GetParam() == "fake") {
      nics_ = std::make_unique<TwoNics>();
      pair_ = std::make_unique<Pair>(fake::Fabric::library(), "nic0", "nic1", tuning);
      return;
    }
    pair_ = std::make_unique<Pair>(*test::must(Library::load()), test::device("sender", 0), test::device("receiver", 0),
                                   tuning);
  }
  Pair& pair() {
    if (!pair_) open();
    return *pair_;
  }

 private:
  std::unique_ptr<TwoNics> nics_;  // outlives the pair
  std::unique_ptr<Pair> pair_;
};

std::vector<std::string> libraries() {
  return std::getenv("KVC_TEST_DEVICES") == nullptr ? std::vector<std::string>{"fake"}
                                                    : std::vector<std::string>{"fake", "real"};
}
INSTANTIATE_TEST_SUITE_P(Libraries, VerbsDomains, testing::ValuesIn(libraries()),
                         [](const auto& info) { return info.param; });

TEST_P(VerbsDomains, PagesArriveAndCount) {
  Pair& p = pair();
  p.connect();
  p.a.fill(1);
  const Batch batch = pages(1, 64);
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, batch), Posted::kYes);
  p.run_until([&] { return p.a.record.succeeded(1) && p.b.record.counted == 64; });
  expect_written(p.a, p.b, batch);
  EXPECT_EQ(p.b.record.immediates, std::vector<uint32_t>{immediate_of(64)}) << "one WriteImm stands for all";
  EXPECT_EQ(p.b.record.immediate_links, std::vector<LinkId>{kLinkOfB});
  EXPECT_GT(p.a.domain->connector().bits_per_second(), 0U);
}

TEST_P(VerbsDomains, BothEndsMayPostAtOnce) {
  Pair& p = pair();
  const Bytes offer = test::must(p.a.domain->offer(kLinkOfA));
  const Bytes answer = test::must(p.b.domain->accept(kLinkOfB, offer));
  // B may post from here on. The domain takes it when its transport is up.
  bool posted_b = post(p.b, kLinkOfB, p.a, pages(2, 8, 100)) == Posted::kYes;
  test::must(p.a.domain->complete(kLinkOfA, answer));
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(1, 8)), Posted::kYes);
  p.run_until([&] {
    posted_b = posted_b || post(p.b, kLinkOfB, p.a, pages(2, 8, 100)) == Posted::kYes;
    return p.a.record.succeeded(1) && p.b.record.succeeded(2) && p.a.record.counted == 8 && p.b.record.counted == 8;
  });
}

TEST_P(VerbsDomains, ManyBatchesThroughAShortQueue) {
  Tuning tuning;
  tuning.write_slots = 16;
  tuning.write_receives = 8;
  tuning.receive_batch = 4;
  open(tuning);
  Pair& p = pair();
  p.connect();
  p.a.fill(2);
  WorkId next = 1;
  size_t busy = 0;
  p.run_until(
      [&] {
        while (next <= 200) {
          Batch batch = pages(next, 1 + next % 7, next % 100);
          if (post(p.a, kLinkOfA, p.b, batch) == Posted::kBusy) {
            ++busy;
            break;
          }
          ++next;
        }
        return p.a.record.completed.size() == 200;
      },
      "all batches");
  EXPECT_GT(busy, 0U);
  uint64_t expected = 0;
  for (WorkId work = 1; work <= 200; ++work) {
    EXPECT_TRUE(p.a.record.succeeded(work));
    expected += 1 + work % 7;
  }
  p.run_until([&] { return p.b.record.counted >= expected; });
  EXPECT_EQ(p.b.record.counted, expected);
}

TEST_P(VerbsDomains, PagesInARowAreOneWriteAndCountEach) {
  Pair& p = pair();
  p.connect();
  p.a.fill(3);
  Batch batch;
  for (uint64_t i = 0; i < 10; ++i) {
    batch.from.push_back(i * 4096);
    batch.to.push_back((20 + i) * 4096);
  }
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, batch), Posted::kYes);
  EXPECT_EQ(p.a.held().credits_used, 2U) << "one for the pages, one for the hello";
  p.run_until([&] { return p.a.record.succeeded(1) && p.b.record.counted == 10; });
  expect_written(p.a, p.b, batch);
}

TEST_P(VerbsDomains, SmallPagesAndPlainWrites) {
  Pair& p = pair();
  p.connect();
  p.a.fill(4);
  Batch batch{.work = 5, .page_bytes = 24, .from = {0, 100, 200}, .to = {300, 24, 77}, .counted = false};
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, batch), Posted::kYes);
  p.run_until([&] { return p.a.record.succeeded(5); });
  expect_written(p.a, p.b, batch);
  EXPECT_TRUE(p.b.record.immediates.empty());
}

TEST_P(VerbsDomains, ImmediatesAlone) {
  Pair& p = pair();
  p.connect();
  Batch batch{.work = 6, .page_bytes = 0, .from = {0, 0, 0}, .to = {0, 0, 0}};
  batch.rkey = 0;
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, batch), Posted::kYes);
  p.run_until([&] { return p.a.record.succeeded(6) && p.b.record.counted == 3; });
  EXPECT_EQ(p.b.record.immediates.size(), 1U);
}

TEST_P(VerbsDomains, MessagesBothWaysOfEveryLength) {
  Pair& p = pair();
  p.connect();
  const std::vector<size_t> lengths = {1, 100, 4095, 4096};
  size_t sent = 0;
  p.run_until([&] {
    while (sent < 40) {
      Bytes message(lengths[sent % 4], static_cast<std::byte>(sent));
      End& from = sent % 2 == 0 ? p.a : p.b;
      if (from.domain->send(sent % 2 == 0 ? kLinkOfA : kLinkOfB, sent, message) == Posted::kBusy) break;
      ++sent;
    }
    return p.a.record.completed.size() + p.b.record.completed.size() == 40;
  });
  ASSERT_EQ(p.a.record.messages.size() + p.b.record.messages.size(), 40U);
  for (End* end : {&p.a, &p.b}) {
    for (const auto& [link, message] : end->record.messages) {
      EXPECT_EQ(link, end == &p.a ? kLinkOfA : kLinkOfB);
      const auto number = static_cast<size_t>(message[0]);
      EXPECT_EQ(message, Bytes(lengths[number % 4], static_cast<std::byte>(number)));
    }
  }
}

TEST_P(VerbsDomains, UnreadMessagesStopNeitherWritesNorOtherLinks) {
  Pair& p = pair();
  p.connect();
  p.connect(kLinkOfA + 1, kLinkOfB + 1);
  p.b.record.message_room = 0;
  size_t taken = 0;
  p.run_until([&] {
    const Bytes message(8, std::byte{1});
    while (taken < 100 && p.a.domain->send(kLinkOfA, 1000 + taken, message) == Posted::kYes) ++taken;
    return taken >= kMessageSlots;
  });
  EXPECT_EQ(taken, kMessageSlots) << "what a peer that does not read makes us hold is bounded";
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(1, 4)), Posted::kYes);
  ASSERT_EQ(p.a.domain->send(kLinkOfA + 1, 2, Bytes(5, std::byte{2})), Posted::kYes);
  p.run_until([&] { return p.a.record.succeeded(1) && p.b.record.counted == 4; });
  EXPECT_FALSE(p.a.record.succeeded(1000)) << "a message is done when the peer's engine has taken it";
  p.b.record.message_room = SIZE_MAX;
  p.run_until([&] { return p.a.record.completed.size() == 2 + kMessageSlots; });
  EXPECT_EQ(p.b.record.messages.size(), 1 + kMessageSlots);
}

TEST_P(VerbsDomains, AFenceCompletesEverythingAndTellsThePeer) {
  Pair& p = pair();
  p.connect();
  for (WorkId work = 1; work <= 4; ++work) ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(work, 64)), Posted::kYes);
  p.fence(p.a, kLinkOfA);
  EXPECT_EQ(p.a.record.completed.size(), 4U) << "each batch ended before fence() said true";
  EXPECT_TRUE(p.a.domain->fence(kLinkOfA));
  EXPECT_TRUE(p.a.record.down.empty());
  p.run_until([&] { return !p.b.record.down.empty(); }, "the peer hears of it");
  ASSERT_EQ(p.b.record.down.size(), 1U);
  EXPECT_EQ(p.b.record.down[0].link, kLinkOfB);
  EXPECT_EQ(p.b.record.down[0].error.code, ErrorCode::kPeerDown);
  EXPECT_TRUE(p.b.domain->fence(kLinkOfB)) << "nothing is left to wait for";
  p.expect_empty();
}

TEST_P(VerbsDomains, WhatWasCompletedWasCountedBeforeTheFenceReturns) {
  Pair& p = pair();
  p.connect();
  WorkId next = 1;
  while (post(p.a, kLinkOfA, p.b, pages(next, 16)) == Posted::kYes) ++next;
  // The receiver does not poll, and the sender takes completions.
  for (int turn = 0; turn < 2000 && p.a.record.completed.empty(); ++turn) p.a.domain->poll();
  fence(*p.b.domain, kLinkOfB);
  const uint64_t counted = p.b.record.counted;
  run_until({p.a.domain.get()}, [&] { return p.a.record.completed.size() == next - 1; }, "the sender's batches");
  size_t done = 0;
  for (const auto& [work, error] : p.a.record.completed) done += error ? 0 : 1;
  EXPECT_GE(counted, 16 * done) << "a batch that completed well is in the receiver's count";
  run_idle(p.both());
  EXPECT_EQ(p.b.record.counted, counted) << "nothing is counted after the fence";
}

TEST_P(VerbsDomains, AReceiverThatFencesAtOnceAfterItsLastPageFailsNoSender) {
  Pair& p = pair();
  for (LinkId link = 1; link <= 10; ++link) {
    p.connect(link, link);
    ASSERT_EQ(post(p.a, link, p.b, pages(link, 4)), Posted::kYes);
    ASSERT_EQ(p.a.domain->send(link, 100 + link, Bytes(10, std::byte{1})), Posted::kYes);
    p.run_until([&] { return p.b.record.counted == 4 * link && p.b.record.messages.size() == link; });
    p.fence(p.b, link);
    p.run_until([&] { return p.a.record.down.size() == link; });
    EXPECT_TRUE(p.a.record.succeeded(link));
    EXPECT_TRUE(p.a.record.succeeded(100 + link));
    p.fence(p.a, link);
  }
  p.expect_empty();
}

TEST_P(VerbsDomains, AWrongKeyBreaksTheLinkAndNoOther) {
  Pair& p = pair();
  p.connect();
  p.connect(kLinkOfA + 1, kLinkOfB + 1);
  Batch wrong = pages(1, 2);
  wrong.rkey = p.b.rkey ^ 0x5A5A00;
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, wrong), Posted::kYes);
  ASSERT_EQ(post(p.a, kLinkOfA + 1, p.b, pages(2, 2)), Posted::kYes);
  p.run_until([&] { return p.a.record.completed.size() == 2 && !p.a.record.down.empty() && !p.b.record.down.empty(); });
  ASSERT_TRUE(p.a.record.completed[1].has_value());
  EXPECT_EQ(p.a.record.completed[1]->code, ErrorCode::kUnknownRegion) << p.a.record.completed[1]->to_string();
  EXPECT_TRUE(p.a.record.succeeded(2));
  EXPECT_EQ(p.b.record.counted, 2U);
  EXPECT_EQ(p.a.record.down.size(), 1U);
  EXPECT_EQ(p.b.record.down.size(), 1U) << "the other end hears of it without writing";
}

TEST_P(VerbsDomains, AKeyOfAnotherDomainIsRefusedWithoutHarm) {
  Pair& p = pair();
  p.connect();
  Batch wrong = pages(1, 2);
  wrong.rkey = p.a.rkey;
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, wrong), Posted::kYes);
  EXPECT_EQ(p.a.record.completed[1]->code, ErrorCode::kUnknownRegion);
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(2, 2)), Posted::kYes);
  p.run_until([&] { return p.a.record.succeeded(2) && p.b.record.counted == 2; });
  EXPECT_TRUE(p.a.record.down.empty());
}

TEST_P(VerbsDomains, ARevokedKeyIsRefused) {
  Pair& p = pair();
  p.connect();
  EXPECT_TRUE(p.b.domain->deregister_region(p.b.rkey));
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(1, 2)), Posted::kYes);
  p.run_until([&] { return p.a.record.completed.size() == 1; });
  ASSERT_TRUE(p.a.record.completed[1].has_value());
  EXPECT_EQ(p.a.record.completed[1]->code, ErrorCode::kUnknownRegion);
  EXPECT_EQ(p.b.record.counted, 0U);
}

// 11: a datagram lost in the handshake was never repeated, and a queue pair in error was never replaced. Here a
// connection consists of the offer and the answer only. A broken link is reported once, and the next offer makes a new
// one.
TEST_P(VerbsDomains, PublishedDefect11ABrokenLinkIsTornDownReportedOnceAndReplaced) {
  Pair& p = pair();
  p.connect();
  Batch wrong = pages(1, 2);
  wrong.rkey = p.b.rkey ^ 0x5A5A00;
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, wrong), Posted::kYes);
  p.run_until([&] { return !p.a.record.down.empty() && !p.b.record.down.empty(); });
  run_idle(p.both());
  EXPECT_EQ(p.a.record.down.size(), 1U);
  EXPECT_EQ(p.b.record.down.size(), 1U);
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(2, 1)), Posted::kYes) << "the old link: an error, not silence";
  EXPECT_EQ(p.a.record.completed[2]->code, ErrorCode::kPeerDown);
  p.connect(kLinkOfA + 7, kLinkOfB + 7);
  ASSERT_EQ(post(p.a, kLinkOfA + 7, p.b, pages(3, 8)), Posted::kYes);
  p.run_until([&] { return p.a.record.succeeded(3) && p.b.record.counted == 8; });
  for (const LinkId link : {kLinkOfA, kLinkOfA + 7}) p.fence(p.a, link);
  p.run_until([&] { return p.b.record.down.size() == 2; });
  for (const LinkId link : {kLinkOfB, kLinkOfB + 7}) p.fence(p.b, link);
  p.expect_empty();
}

TEST_P(VerbsDomains, OfferedLinksAreCheapToWithdraw) {
  Pair& p = pair();
  for (LinkId link = 100; link < 108; ++link) (void)test::must(p.a.domain->offer(link));
  for (LinkId link = 100; link < 108; ++link) EXPECT_TRUE(p.a.domain->fence(link));
  EXPECT_EQ(p.a.held().links, 0U);
  EXPECT_EQ(p.a.domain->complete(100, {}).error().code, ErrorCode::kUnknownPeer) << "the offer is void";
}

TEST_P(VerbsDomains, StrangeBytesAreRefused) {
  Pair& p = pair();
  const Bytes offer = test::must(p.a.domain->offer(kLinkOfA));
  for (size_t length = 0; length < offer.size(); ++length) {
    const Bytes part(offer.begin(), offer.begin() + static_cast<ptrdiff_t>(length));
    Result<Bytes> answer = p.b.domain->accept(kLinkOfB, part);
    ASSERT_FALSE(answer.ok());
    EXPECT_EQ(answer.error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_EQ(p.b.held().links, 0U);
}

TEST_P(VerbsDomains, ASleepingDomainIsWokenByItsDescriptor) {
  Pair& p = pair();
  p.connect();
  p.run_until([&] { return p.a.held().credits_used == 0; }, "the hello");
  run_idle(p.both());
  while (!p.b.domain->prepare_sleep()) p.b.domain->poll();
  pollfd fd{p.b.domain->domain().fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&fd, 1, 0), 0) << "nothing has come yet";
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(1, 1)), Posted::kYes);
  for (int turn = 0; turn < 2000 && !p.a.record.succeeded(1); ++turn) p.a.domain->poll();
  ASSERT_EQ(::poll(&fd, 1, 20'000), 1);
  p.run_until([&] { return p.b.record.counted == 1; });
}

// --- Behaviour that only the stand-in can show.

TEST(VerbsFaults, APeerThatGoesWhileNothingIsSentIsNoticed) {
  Tuning tuning;
  tuning.ask_interval = std::chrono::milliseconds(5);
  FakePair p(tuning);
  p.connect();
  p.run_until([&] { return p.a.held().credits_used == 0; }, "the hello");
  const auto asleep = [&] { return p.a.domain->prepare_sleep(); };
  p.run_until(asleep, "the worker may sleep");
  p.fail_next = abi::IBV_WC_RETRY_EXC_ERR;
  // Its timer wakes it, not its owner.
  pollfd fd{p.a.domain->domain().fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&fd, 1, 20'000), 1);
  p.run_until([&] { return asleep() && !p.a.record.down.empty(); }, "the link is down");
}

// 3: the published code read opcode and byte counts of failed completions, which mean nothing, and used their wr_id as
// a pointer. The stand-in fills failed completions with the fields of an immediate from nowhere.
TEST(VerbsFaults, PublishedDefect03AFailedCompletionIsReadByOurOwnIdAlone) {
  FakePair p;
  p.connect();
  p.run_until([&] { return p.a.held().credits_used == 0; }, "the hello");
  p.stalled = true;
  for (WorkId work = 1; work <= 3; ++work) ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(work, 3)), Posted::kYes);
  p.fail_next = abi::IBV_WC_REM_ACCESS_ERR;
  p.stalled = false;
  p.run_until([&] { return p.a.record.completed.size() == 3 && !p.a.record.down.empty(); });
  EXPECT_EQ(p.a.record.completed[1]->code, ErrorCode::kUnknownRegion) << "the one that failed";
  EXPECT_NE(p.a.record.completed[1]->message.find("remote access error"), std::string::npos);
  EXPECT_EQ(p.a.record.completed[2]->code, ErrorCode::kPeerDown) << "the others: flushed";
  EXPECT_EQ(p.a.record.completed[3]->code, ErrorCode::kPeerDown);
  EXPECT_TRUE(p.a.record.immediates.empty());
  EXPECT_TRUE(p.b.record.immediates.empty());
  EXPECT_EQ(p.a.record.down.size(), 1U);
}

// 4: the published code answered a handshake before its own queue pairs could receive.
TEST(VerbsFaults, PublishedDefect04AnAnswerIsGivenByQueuePairsThatAreReady) {
  FakePair p;
  const Bytes offer = test::must(p.a.domain->offer(kLinkOfA));
  const Bytes answer = test::must(p.b.domain->accept(kLinkOfB, offer));
  const Endpoint end = test::must(Endpoint::decode(answer, "test"));
  for (const uint32_t number : {end.writes.number, end.messages.number}) {
    fake::Qp* const qp = p.find(number);
    ASSERT_NE(qp, nullptr);
    EXPECT_EQ(qp->state, abi::IBV_QPS_RTS) << "takes in what comes, and may send once it is asked to";
    EXPECT_FALSE(reinterpret_cast<fake::Srq*>(qp->srq)->receives.empty());
  }
  // The accepting side waits for the offerer's hello, however long that takes.
  EXPECT_EQ(post(p.b, kLinkOfB, p.a, pages(1, 1)), Posted::kBusy);
  run_idle(p.both());
  EXPECT_EQ(post(p.b, kLinkOfB, p.a, pages(1, 1)), Posted::kBusy);
  test::must(p.a.domain->complete(kLinkOfA, answer));
  p.run_until([&] { return post(p.b, kLinkOfB, p.a, pages(1, 1)) == Posted::kYes; });
  p.run_until([&] { return p.a.record.counted == 1; });
  EXPECT_EQ(p.posts_before_ready, 0);
}

TEST(VerbsFaults, AnAcceptedLinkWhoseHelloNeverComesEnds) {
  Tuning tuning;
  tuning.connect_timeout = std::chrono::milliseconds(20);
  FakePair p(tuning);
  const Bytes offer = test::must(p.a.domain->offer(kLinkOfA));
  (void)test::must(p.b.domain->accept(kLinkOfB, offer));
  run_until({p.b.domain.get()}, [&] { return !p.b.record.down.empty(); }, "the deadline");
  EXPECT_EQ(p.b.record.down[0].error.code, ErrorCode::kPeerDown);
  EXPECT_TRUE(p.b.domain->fence(kLinkOfB));
  EXPECT_EQ(p.b.held().links, 0U);
}

// 5: the published code assumed port 1, GID 0 and pkey 0, and sent immediates in memory order.
TEST(VerbsFaults, PublishedDefect05PortGidAndPkeyAreChosenAndImmediatesAreBigEndian) {
  fake::Fabric fabric;
  const auto ports = [](uint8_t last) {
    return std::vector<fake::Port>{{.state = 1, .gids = {{abi::IBV_GID_TYPE_ROCE_V2, fake::ipv4(200)}}},
                                   {.gids = {{abi::IBV_GID_TYPE_ROCE_V1, fake::ipv4(last)},
                                             {abi::IBV_GID_TYPE_ROCE_V2, fake::link_local(last)},
                                             {abi::IBV_GID_TYPE_ROCE_V2, Gid{}},
                                             {abi::IBV_GID_TYPE_ROCE_V2, fake::ipv6(last)},
                                             {abi::IBV_GID_TYPE_ROCE_V2, fake::ipv4(last)}},
                                    .pkeys = {0x7FFF, 0x8001, 0xFFFF}}};
  };
  fabric.add("nic0", ports(1));
  fabric.add("nic1", ports(2));
  Pair p(fake::Fabric::library(), "nic0", "nic1,tc=106");
  p.connect();
  EXPECT_EQ(p.a.domain->connector().description(), "verbs nic0:2 RoCE v2 10.77.0.1 (gid 4)");
  for (const auto& qp : fabric.queue_pairs) {
    EXPECT_EQ(qp->init.port_num, 2);
    EXPECT_EQ(qp->init.pkey_index, 1) << "the first full-member one";
    EXPECT_EQ(qp->rtr.ah_attr.port_num, 2);
    EXPECT_EQ(qp->rtr.ah_attr.grh.sgid_index, 4) << "RoCE v2 with an IPv4 address";
    EXPECT_EQ(qp->rtr.ah_attr.is_global, 1);
  }
  EXPECT_EQ(std::count_if(fabric.queue_pairs.begin(), fabric.queue_pairs.end(),
                          [](const auto& qp) { return qp->rtr.ah_attr.grh.traffic_class == 106; }),
            2);
  fabric.log.clear();
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(1, 1)), Posted::kYes);
  p.run_until([&] { return p.b.record.counted == 1; });
  std::array<uint8_t, 4> wire{};
  std::memcpy(wire.data(), &fabric.log.at(0).request.imm_data, 4);
  const uint32_t sent = immediate_of(1);
  EXPECT_EQ(wire, (std::array<uint8_t, 4>{static_cast<uint8_t>(sent >> 24), static_cast<uint8_t>(sent >> 16),
                                          static_cast<uint8_t>(sent >> 8), static_cast<uint8_t>(sent)}));
  EXPECT_EQ(p.b.record.immediates.at(0), sent);
}

// 6: the published code started its own send queue with the peer's packet sequence number. This was not noticed because
// both were constants. The stand-in answers no packets with other numbers than announced.
TEST(VerbsFaults, PublishedDefect06EachSideBeginsWithItsOwnRandomPacketSequenceNumber) {
  FakePair p;
  std::set<uint32_t> seen;
  for (LinkId link = 0; link < 8; ++link) {
    const Bytes offer = test::must(p.a.domain->offer(kLinkOfA + link));
    const Bytes answer = test::must(p.b.domain->accept(kLinkOfB + link, offer));
    test::must(p.a.domain->complete(kLinkOfA + link, answer));
    p.run_until([&] { return post(p.b, kLinkOfB + link, p.a, pages(link, 1)) == Posted::kYes; });
    const Endpoint a = test::must(Endpoint::decode(offer, "test"));
    const Endpoint b = test::must(Endpoint::decode(answer, "test"));
    const auto check = [&](const QueueEnd& own, const QueueEnd& peer) {
      fake::Qp* const qp = p.find(own.number);
      ASSERT_NE(qp, nullptr);
      EXPECT_EQ(qp->rts.sq_psn, own.psn);
      EXPECT_EQ(qp->rtr.rq_psn, peer.psn);
      EXPECT_EQ(qp->rtr.dest_qp_num, peer.number);
      seen.insert(own.psn);
    };
    check(a.writes, b.writes);
    check(b.writes, a.writes);
    check(a.messages, b.messages);
    check(b.messages, a.messages);
  }
  EXPECT_GE(seen.size(), 31U) << "32 random numbers of 24 bits";
  EXPECT_EQ(p.posts_before_ready, 0);
}

TEST(VerbsFaults, OutOfMemoryWhilePostingIsBackPressure) {
  for (const uint32_t taken : {0U, 1U, 7U, 15U}) {
    FakePair p;
    p.connect();
    p.a.fill(9);
    p.memory_for = taken;
    const Batch batch = pages(1, 16);
    ASSERT_EQ(post(p.a, kLinkOfA, p.b, batch), Posted::kYes);
    p.run_until([&] { return p.a.record.succeeded(1) && p.b.record.counted == 16; });
    expect_written(p.a, p.b, batch);
    EXPECT_TRUE(p.a.record.down.empty());
    EXPECT_EQ(p.b.record.immediates.size(), 1U);
  }
}

TEST(VerbsFaults, PagesLongerThanARequestMayCarryGoInPieces) {
  TwoNics nics;
  for (fake::Device& device : nics.devices) device.max_message = 1000;
  Tuning tuning;
  tuning.write_slots = 8;  // fewer than the pieces
  Pair p(fake::Fabric::library(), "nic0", "nic1", tuning);
  p.connect();
  p.a.fill(10);
  Batch batch{.work = 1, .page_bytes = 40'001, .from = {0, 50'000}, .to = {100'000, 7}};
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, batch), Posted::kYes);
  EXPECT_EQ(post(p.a, kLinkOfA, p.b, pages(2, 1)), Posted::kBusy) << "behind the rest of the first";
  p.run_until([&] { return p.a.record.succeeded(1) && p.b.record.counted == 2; });
  expect_written(p.a, p.b, batch);
}

TEST(VerbsFaults, TheCompletionQueueIsNeverOverrun) {
  TwoNics nics;
  for (fake::Device& device : nics.devices) device.max_cqe = 64;
  Tuning tuning;
  tuning.write_receives = 16;
  tuning.message_receives = 8;
  tuning.message_buffers = 8;
  Pair p(fake::Fabric::library(), "nic0", "nic1", tuning);
  for (LinkId link = 0; link < 4; ++link) p.connect(kLinkOfA + link, kLinkOfB + link);
  nics.stalled = true;
  size_t posted = 0;
  for (WorkId work = 0; work < 400; ++work) {
    if (post(p.a, kLinkOfA + work % 4, p.b, pages(work, 3)) == Posted::kYes) ++posted;
  }
  EXPECT_GT(posted, 4U);
  EXPECT_LT(posted, 20U) << "64 entries less 24 receives, at 3 requests a batch";
  // Everything fails at once: every request takes an entry, signalled or not.
  for (LinkId link = 0; link < 4; ++link) nics.error(*nics.queue_pairs.front());
  nics.stalled = false;
  p.run_until([&] { return p.a.record.completed.size() == posted; });
  EXPECT_EQ(nics.cq_overruns, 0);
}

TEST(VerbsFaults, ADeviceThatFailsEndsEveryLinkWithItsWords) {
  FakePair p;
  p.connect();
  p.connect(kLinkOfA + 1, kLinkOfB + 1);
  const Bytes offer = test::must(p.b.domain->offer(76));
  p.raise("nic0", {{.port_num = 0}, abi::IBV_EVENT_DEVICE_FATAL});
  run_until({p.a.domain.get()}, [&] { return p.a.record.down.size() == 2; }, "both links");
  EXPECT_EQ(p.a.record.down[0].error.message, "an event of the device");
  // New connections do not use this domain, and get the reason.
  for (const Result<Bytes>& refused : {p.a.domain->offer(77), p.a.domain->accept(78, offer)}) {
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().message, "nic0 has failed: an event of the device");
  }
  EXPECT_TRUE(p.b.domain->offer(79).ok()) << "another NIC is none the worse";
}

// As on the threads of the transfer engine: a new link reaches a domain that has read the event meanwhile.
TEST(VerbsFaults, ALinkThatComesAfterItsDeviceHasFailedEnds) {
  FakePair p;
  const Bytes offer = test::must(p.a.domain->offer(kLinkOfA));
  Connector::Accepted accepted = test::must(p.b.domain->connector().accept(kLinkOfB, offer));
  p.raise("nic1", {{.port_num = 0}, abi::IBV_EVENT_DEVICE_FATAL});
  p.run_until([&] { return !p.events_left(); }, "the event");
  p.b.domain->domain().attach(kLinkOfB, std::move(accepted.end));
  p.run_until([&] { return !p.b.record.down.empty(); });
  EXPECT_EQ(p.b.record.down[0].error.message, "an event of the device");
  EXPECT_TRUE(p.b.domain->fence(kLinkOfB));
}

TEST(VerbsFaults, APortThatStaysDownTakesItsLinksWithIt) {
  Tuning tuning;
  tuning.port_timeout = std::chrono::milliseconds(30);
  FakePair p(tuning);
  p.connect();
  p.stalled = true;  // rxe: nothing completes any more, not even with an error
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(1, 4)), Posted::kYes);
  p.raise("nic0", {{.port_num = 2}, abi::IBV_EVENT_PORT_ERR});  // another port
  p.raise("nic0", {{.port_num = 1}, abi::IBV_EVENT_PORT_ERR});
  run_until({p.a.domain.get()}, [&] { return !p.a.record.down.empty(); }, "the port's deadline");
  EXPECT_EQ(p.a.record.completed[1]->code, ErrorCode::kPeerDown);
  EXPECT_EQ(p.a.record.down[0].error.message, "nic0's port is down");
  p.stalled = false;
  // Down and up again in time: no harm.
  p.connect(kLinkOfA + 1, kLinkOfB + 1);
  p.raise("nic0", {{.port_num = 1}, abi::IBV_EVENT_PORT_ERR});
  p.raise("nic0", {{.port_num = 1}, abi::IBV_EVENT_PORT_ACTIVE});
  const auto until = Clock::now() + 3 * tuning.port_timeout;
  p.run_until([&] { return !p.events_left() && Clock::now() > until; });
  EXPECT_EQ(p.a.record.down.size(), 1U);
}

TEST(VerbsWire, OurIdsHoldWhatTheyAreMadeOf) {
  for (const auto kind : {WorkRequestId::Kind::kWrite, WorkRequestId::Kind::kMessage,
                          WorkRequestId::Kind::kWriteReceive, WorkRequestId::Kind::kMessageReceive}) {
    for (const LinkId link : {0U, 1U, 0xFFFFFFFFU}) {
      for (const uint32_t sequence : {0U, 1U, WorkRequestId::kSequenceMask}) {
        const WorkRequestId id = WorkRequestId::decode(WorkRequestId{kind, link, sequence}.encode());
        EXPECT_EQ(id.kind, kind);
        EXPECT_EQ(id.link, link);
        EXPECT_EQ(id.sequence, sequence);
      }
    }
  }
}

}  // namespace
}  // namespace kvc::verbs
