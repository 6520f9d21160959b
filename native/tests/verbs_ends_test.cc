// How links of the verbs provider end: what is counted, acknowledged and returned, and by which thread. Uses a stand-in
// for libibverbs that ends queue pairs as mlx5 does.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "engine/control_thread.h"
#include "tests/verbs_test_support.h"

namespace kvc::verbs {
namespace {

// Receives are returned one by one, so none is left when all is idle. An end waits without limit as long as it makes
// progress.
Tuning every_receive() {
  Tuning tuning;
  tuning.receive_batch = 1;
  tuning.flush_timeout = std::chrono::hours(1);
  return tuning;
}

// --- Receives

// A receive that a queue pair has begun to fill, or whose entry was not taken, must not be lost with the queue pair.
// After 128 lost receives, no message of any peer would find one.
TEST(VerbsEnds, LinksThatComeAndGoLoseNoReceive) {
  constexpr LinkId kLinks = 300;  // more than twice the number of receives for messages
  FakePair p(every_receive());
  p.messages_half_arrived = true;
  p.flush_lag = 40;
  p.connect(1, 1);  // in use all the time
  WorkId work = 0;
  uint64_t posted = 0;
  const auto traffic = [&] {
    if (post(p.a, 1, p.b, pages(++work, 3)) == Posted::kYes) posted += 3;
    (void)p.b.domain->send(1, ++work, Bytes(100, std::byte{1}));
  };
  const auto turn = [&] {
    p.a.domain->poll();
    p.b.domain->poll();
  };
  for (LinkId link = 2; link < 2 + kLinks; ++link) {
    p.connect(link, link);
    ASSERT_EQ(p.live_queue_pairs(), 8U) << "two for each end of a link, and none of those before";
    for (int i = 0; i < 4; ++i) {
      traffic();
      (void)post(p.a, link, p.b, pages(++work, 2));
      (void)p.a.domain->send(link, ++work, Bytes(1000, std::byte{2}));
      (void)p.b.domain->send(link, ++work, Bytes(1000, std::byte{3}));
      if (i % 2 == 0) turn();
    }
    // Ended by A, by B, by both at once, or by a key that the NIC refuses, with messages in flight in either direction.
    if (link % 4 == 3) {
      Batch wrong = pages(++work, 1);
      wrong.rkey = p.b.rkey ^ 0x5A5A00;
      (void)post(p.a, link, p.b, wrong);
    }
    bool a_fenced = link % 4 == 1;
    bool b_fenced = link % 4 == 0;
    for (int turns = 0; !a_fenced || !b_fenced || p.a.held().links > 1 || p.b.held().links > 1; ++turns) {
      ASSERT_LT(turns, 10'000) << "link " << link;
      if (turns == 3) a_fenced = b_fenced = false;
      if (!a_fenced) a_fenced = p.a.domain->fence(link);
      if (!b_fenced) b_fenced = p.b.domain->fence(link);
      traffic();
      turn();
    }
  }
  p.messages_half_arrived = false;
  p.fence(p.a, 1);
  p.fence(p.b, 1);
  p.expect_empty();
  EXPECT_EQ(p.lost_receives, 0);
  for (const char* nic : {"nic0", "nic1"}) {
    EXPECT_EQ(p.posted_receives(nic), (std::vector<size_t>{Tuning{}.write_receives, Tuning{}.message_receives})) << nic;
  }
  EXPECT_GT(p.b.record.counted, posted / 2);
}

TEST(VerbsEnds, AQueuePairIsKeptUntilItsLastReceiveIsBack) {
  FakePair p(every_receive());
  p.messages_half_arrived = true;
  p.flush_lag = 1 << 20;
  p.connect();
  run_idle(p.both());
  EXPECT_FALSE(p.b.domain->fence(kLinkOfB));
  run_idle(p.both());
  EXPECT_FALSE(p.b.domain->fence(kLinkOfB));
  EXPECT_EQ(p.live_queue_pairs(), 4U);
  p.messages_half_arrived = false;
  p.flush_lag = 1;
  for (auto& qp : p.queue_pairs) {
    if (qp->flushed_at) qp->flushed_at = 0;
  }
  p.fence(p.b, kLinkOfB);
  EXPECT_EQ(std::count_if(p.queue_pairs.begin(), p.queue_pairs.end(),
                          [](const auto& qp) {
                            return fake::Context::of(qp->context).nic->name == "nic1" &&
                                   (qp->init.qp_access_flags & abi::IBV_ACCESS_REMOTE_WRITE) != 0;
                          }),
            0)
      << "nothing can be written over what is left";
  EXPECT_EQ(p.lost_receives, 0);
  p.fence(p.a, kLinkOfA);
  p.expect_empty();
}

// More than one poll() handles: entries that the destruction of a queue pair would remove are taken before.
TEST(VerbsEnds, WhatIsInTheCompletionQueueIsTakenBeforeTheEnd) {
  Tuning tuning = every_receive();
  tuning.poll_completions = Completions::kBatch;
  FakePair p(tuning);
  p.connect();
  run_idle(p.both());
  p.write_acknowledgements_lost = true;
  constexpr WorkId kBatches = 200;
  for (WorkId work = 0; work < kBatches; ++work) ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(work, 1)), Posted::kYes);
  for (WorkId work = kBatches; work < kBatches + 10; ++work) {
    ASSERT_EQ(p.a.domain->send(kLinkOfA, work, Bytes(1, std::byte{1})), Posted::kYes);
  }
  fence(*p.b.domain, kLinkOfB);
  EXPECT_EQ(p.b.record.counted, kBatches);
  EXPECT_EQ(p.b.record.messages.size(), 10U);
  p.run_until([&] { return !p.a.record.down.empty(); });
  for (WorkId work = 0; work < kBatches + 10; ++work) EXPECT_TRUE(p.a.record.succeeded(work)) << work;
  p.fence(p.a, kLinkOfA);
  p.expect_empty();
  EXPECT_EQ(p.lost_receives, 0);
}

// Entries of a destroyed queue pair still occupy room.
TEST(VerbsEnds, RoomIsFreeOnceTheEntriesAreTaken) {
  Tuning tuning;
  tuning.poll_completions = Completions::kBatch;
  tuning.flush_timeout = std::chrono::milliseconds(0);
  FakePair p(tuning);
  p.says_last_receive = false;
  p.purges = false;
  p.flush_lag = 1 << 20;
  p.connect();
  run_idle(p.both());
  p.stalled = true;
  for (WorkId work = 0; work < 100; ++work) ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(work, 2)), Posted::kYes);
  size_t most = 0;
  for (bool fenced = false; !fenced; fenced = p.a.domain->fence(kLinkOfA)) {
    p.a.domain->poll();
    most = std::max(most, p.entries("nic0"));
    ASSERT_LE(p.entries("nic0"), p.a.held().credits_used);
  }
  EXPECT_GT(most, Completions::kBatch);
}

// rxe of Linux 6.1: no event, and entries of a destroyed queue pair stay in the completion queue.
TEST(VerbsEnds, WhereNoEventComesAnEndIsBounded) {
  Tuning tuning = every_receive();
  tuning.flush_timeout = std::chrono::milliseconds(2);
  FakePair p(tuning);
  p.says_last_receive = false;
  p.purges = false;
  p.messages_half_arrived = true;
  for (LinkId link = 1; link <= 10; ++link) {
    p.connect(link, link);
    (void)p.a.domain->send(link, link, Bytes(10, std::byte{1}));
    p.fence(p.a, link);
    p.fence(p.b, link);
  }
  p.expect_empty();
  for (const char* nic : {"nic0", "nic1"}) {
    EXPECT_EQ(p.posted_receives(nic), (std::vector<size_t>{tuning.write_receives, tuning.message_receives})) << nic;
  }
}

// A queue pair that fails enters ERR by itself, and its event may arrive long before its end.
TEST(VerbsEnds, AnEventThatCameBeforeTheEndCounts) {
  FakePair p(every_receive());
  p.connect();
  run_idle(p.both());
  for (auto& qp : p.queue_pairs) p.error(*qp);
  run_idle(p.both());
  p.run_until([&] { return !p.events_left(); }, "they are read");
  p.fence(p.a, kLinkOfA);
  p.fence(p.b, kLinkOfB);
  p.expect_empty();
}

// 160 messages that are not taken, on a domain with 128 receives: each was copied, and its receive returned.
TEST(VerbsEnds, UntakenMessagesHoldNoReceives) {
  constexpr LinkId kPeers = 10;
  FakePair p;
  p.b.record.message_room = 0;
  WorkId work = 0;
  for (LinkId link = 1; link <= kPeers; ++link) p.connect(link, link);
  p.run_until([&] {
    for (LinkId link = 1; link <= kPeers; ++link) {
      while (work < WorkId{link} * kMessageSlots &&
             p.a.domain->send(link, work, Bytes(4096, std::byte{1})) == Posted::kYes) {
        ++work;
      }
    }
    return work == WorkId{kPeers} * kMessageSlots;
  });
  for (LinkId link = 1; link <= kPeers; ++link) {
    EXPECT_EQ(p.a.domain->send(link, 1000, Bytes(1, std::byte{1})), Posted::kBusy) << "16 are untaken";
  }
  // Internal messages of the links still get through, in both directions.
  for (LinkId link = 1; link <= kPeers; ++link) {
    ASSERT_EQ(p.b.domain->send(link, 2000 + link, Bytes(4096, std::byte{2})), Posted::kYes);
  }
  p.run_until([&] { return p.b.record.completed.size() == kPeers; }, "A takes them, and B hears of it");
  p.fence(p.a, 1);
  p.run_until([&] { return p.b.record.down.size() == 1; }, "the goodbye");
  p.b.record.message_room = SIZE_MAX;
  p.run_until([&] { return p.a.record.completed.size() == kPeers * kMessageSlots; });
  EXPECT_EQ(p.b.record.messages.size(), kPeers * kMessageSlots);
  for (WorkId message = kMessageSlots; message < work; ++message) EXPECT_TRUE(p.a.record.succeeded(message));
}

// --- Offers

TEST(VerbsEnds, AnOfferThatIsVoidLeavesNothing) {
  FakePair p;
  for (LinkId link = 1; link <= 8; ++link) (void)test::must(p.a.domain->offer(link));
  EXPECT_EQ(p.live_queue_pairs(), 16U);
  for (LinkId link = 1; link <= 6; ++link) p.a.domain->connector().withdraw(link);
  p.a.domain->connector().withdraw(1);
  EXPECT_EQ(p.live_queue_pairs(), 4U);
  EXPECT_EQ(p.a.domain->complete(7, Bytes(3)).error().code, ErrorCode::kInvalidArgument);
  const Bytes answer = test::must(p.b.domain->accept(1, test::must(p.a.domain->offer(9))));
  EXPECT_EQ(p.a.domain->complete(8, answer).error().code, ErrorCode::kInvalidArgument) << "another offer's";
  EXPECT_EQ(p.live_queue_pairs(), 4U) << "the third offer's and B's";
  EXPECT_EQ(p.a.domain->complete(8, answer).error().code, ErrorCode::kUnknownPeer) << "it is used up";
}

// --- Messages to the peer at the end

size_t goodbyes(const FakePair& p) {
  return static_cast<size_t>(std::count_if(p.log.begin(), p.log.end(), [](const fake::Sent& sent) {
    return sent.request.opcode == abi::IBV_WR_SEND_WITH_IMM &&
           Control::decode(big_endian(sent.request.imm_data)).kind == Control::Kind::kGoodbye;
  }));
}

TEST(VerbsEnds, AGoodbyeIsNotAnswered) {
  FakePair p;
  p.connect();
  run_idle(p.both());
  p.fence(p.a, kLinkOfA);
  p.run_until([&] { return !p.b.record.down.empty(); });
  p.fence(p.b, kLinkOfB);
  p.expect_empty();
  EXPECT_EQ(goodbyes(p), 1U);
}

// A receiver takes a message, or counts, and closes at once.
TEST(VerbsEnds, WhatWasTakenIsSaidBeforeTheGoodbye) {
  FakePair p;
  p.connect();
  bool fenced = false;
  p.b.domain->on_completion = [&](const Completion& completion) {
    if (completion.kind == Completion::Kind::kMessage) fenced = p.b.domain->fence(kLinkOfB);
  };
  p.run_until([&] { return p.a.domain->send(kLinkOfA, 1, Bytes(10, std::byte{1})) == Posted::kYes; });
  p.run_until([&] { return p.a.record.completed.size() == 1 && !p.a.record.down.empty(); });
  EXPECT_TRUE(p.a.record.succeeded(1));
  EXPECT_EQ(p.b.record.messages.size(), 1U);
  p.fence(p.b, kLinkOfB);
}

TEST(VerbsEnds, AGoodbyeSaysWhatHasLandedAndNothingElseHas) {
  FakePair p;
  p.connect();
  run_idle(p.both());
  p.write_acknowledgements_lost = true;
  Batch plain = pages(2, 2, 50);
  plain.counted = false;
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(1, 3)), Posted::kYes);
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, plain), Posted::kYes);
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(3, 3, 10)), Posted::kYes);
  p.run_until([&] { return p.b.record.counted == 6; });
  EXPECT_FALSE(p.b.domain->fence(kLinkOfB)) << "at once";
  // More may land until the queue pair is stopped.
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(4, 3)), Posted::kYes);
  plain.work = 5;
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, plain), Posted::kYes);
  p.stalled = true;
  ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(6, 3)), Posted::kYes);
  run_until({p.b.domain.get()}, [&] { return p.b.domain->fence(kLinkOfB); }, "fence");
  p.stalled = false;
  size_t completed_when_down = 0;
  p.a.domain->on_completion = [&](const Completion& completion) {
    if (completion.kind == Completion::Kind::kLinkDown) completed_when_down = p.a.record.completed.size();
  };
  p.run_until([&] { return !p.a.record.down.empty(); });
  EXPECT_EQ(completed_when_down, 6U) << "all that was posted ends before the link";
  for (const WorkId landed : {1, 2, 3, 4}) EXPECT_TRUE(p.a.record.succeeded(landed)) << landed;
  EXPECT_EQ(p.a.record.failure(5), ErrorCode::kPeerDown) << "nothing after it says that it has landed";
  EXPECT_EQ(p.a.record.failure(6), ErrorCode::kPeerDown);
  EXPECT_EQ(p.b.record.counted, 9U);
  p.fence(p.a, kLinkOfA);
  p.expect_empty();
}

// A peer that does not poll, and whose receives are all in use.
TEST(VerbsEnds, AFenceDoesNotWaitUntilTheGoodbyeArrives) {
  Tuning tuning;
  tuning.message_receives = 4;
  tuning.goodbye_timeout = std::chrono::hours(1);
  FakePair p(tuning);
  p.connect();
  run_idle(p.both());
  for (WorkId work = 0; work < 4; ++work) {
    ASSERT_EQ(p.a.domain->send(kLinkOfA, work, Bytes(1, std::byte{1})), Posted::kYes);
  }
  fence(*p.a.domain, kLinkOfA);
  EXPECT_EQ(p.a.record.completed.size(), 4U);
  EXPECT_EQ(p.a.held().links, 1U) << "to say goodbye";
  p.run_until([&] { return !p.b.record.down.empty(); }, "the goodbye");
  p.fence(p.b, kLinkOfB);
  p.expect_empty();
}

TEST(VerbsEnds, AGoodbyeIsGivenUpInTheEnd) {
  Tuning tuning;
  tuning.message_receives = 4;
  tuning.goodbye_timeout = std::chrono::milliseconds(20);
  FakePair p(tuning);
  p.connect();
  run_idle(p.both());
  for (WorkId work = 0; work < 4; ++work) {
    ASSERT_EQ(p.a.domain->send(kLinkOfA, work, Bytes(1, std::byte{1})), Posted::kYes);
  }
  fence(*p.a.domain, kLinkOfA);
  run_until({p.a.domain.get()}, [&] { return p.a.held().links == 0; }, "it gives up");
  EXPECT_EQ(p.a.held().buffers_used, 0U);
  EXPECT_EQ(p.a.held().credits_used, 0U);
}

TEST(VerbsEnds, AGoodbyeThatComesTooLateIsNotSaid) {
  Tuning tuning;
  tuning.goodbye_timeout = std::chrono::milliseconds(0);
  FakePair p(tuning);
  p.connect();
  run_idle(p.both());
  p.fence(p.a, kLinkOfA);
  p.run_until([&] { return p.a.held().links == 0; });
  EXPECT_EQ(goodbyes(p), 0U);
}

TEST(VerbsEnds, ADomainThatClosesHasSaidGoodbye) {
  Tuning tuning;
  tuning.close_timeout = std::chrono::hours(1);
  FakePair p(tuning);
  p.connect();
  run_idle(p.both());
  fence(*p.a.domain, kLinkOfA);
  p.a.domain.reset();
  EXPECT_EQ(p.live_queue_pairs(), 2U);
  run_until({p.b.domain.get()}, [&] { return !p.b.record.down.empty(); }, "the goodbye");
  EXPECT_EQ(p.b.record.down[0].error.message, "the peer ended the link");
}

TEST(VerbsEnds, ADomainThatHadNoTimeToFenceAdmitsNoPeer) {
  FakePair p;
  p.connect();
  ASSERT_EQ(post(p.b, kLinkOfB, p.a, pages(1, 1)), Posted::kBusy);
  run_idle(p.both());
  p.a.domain.reset();
  EXPECT_EQ(p.live_queue_pairs(), 2U) << "B's";
  Batch batch = pages(2, 1);
  batch.rkey = p.a.rkey;
  ASSERT_EQ(post(p.b, kLinkOfB, p.a, batch), Posted::kYes);
  run_until({p.b.domain.get()}, [&] { return !p.b.record.down.empty(); });
  EXPECT_EQ(p.b.record.failure(2), ErrorCode::kPeerDown);
}

TEST(VerbsEnds, NothingIsPostedOnALinkThatEnds) {
  FakePair p;
  p.connect();
  run_idle(p.both());
  p.a.domain->domain().fence(kLinkOfA);
  const size_t posted = p.log.size();
  EXPECT_EQ(post(p.a, kLinkOfA, p.b, pages(1, 1)), Posted::kBusy);
  EXPECT_EQ(p.a.domain->send(kLinkOfA, 2, Bytes(1, std::byte{1})), Posted::kBusy);
  EXPECT_EQ(p.log.size(), posted);
  p.fence(p.a, kLinkOfA);
  EXPECT_EQ(post(p.a, kLinkOfA, p.b, pages(1, 1)), Posted::kYes);
  EXPECT_EQ(p.a.domain->send(kLinkOfA, 2, Bytes(1, std::byte{1})), Posted::kYes);
  EXPECT_EQ(p.a.record.failure(1), ErrorCode::kPeerDown);
  EXPECT_EQ(p.a.record.failure(2), ErrorCode::kPeerDown);
}

// --- Peers that break the rules

// What the peer's NIC is about to send.
std::deque<fake::Sent>& under_way(FakePair& p) {
  for (auto& qp : p.queue_pairs) {
    if (!qp->waiting.empty()) return qp->waiting;
  }
  throw std::runtime_error("nothing is under way");
}

TEST(VerbsEnds, AMessageInASlotThatIsNotFreeEndsTheLink) {
  FakePair p;
  p.connect();
  run_idle(p.both());
  p.b.record.message_room = 0;
  p.stalled = true;
  for (WorkId work = 1; work <= 2; ++work) {
    ASSERT_EQ(p.a.domain->send(kLinkOfA, work, Bytes(1, std::byte{1})), Posted::kYes);
  }
  under_way(p)[1].request.imm_data = under_way(p)[0].request.imm_data;
  p.stalled = false;
  p.run_until([&] { return !p.b.record.down.empty(); });
  EXPECT_EQ(p.b.record.down[0].error.message, "the peer sent an unexpected message");
}

TEST(VerbsEnds, TakingWhatWasNotSentEndsTheLink) {
  FakePair p;
  p.connect();
  run_idle(p.both());
  p.stalled = true;
  ASSERT_EQ(p.a.domain->send(kLinkOfA, 1, Bytes(1, std::byte{1})), Posted::kYes);
  under_way(p)[0].request.imm_data = big_endian(Control{Control::Kind::kTaken, 1}.encode());
  p.stalled = false;
  p.run_until([&] { return !p.b.record.down.empty() && !p.a.record.down.empty(); });
  EXPECT_EQ(p.b.record.down[0].error.message, "the peer sent an unexpected message");
  EXPECT_EQ(p.a.record.failure(1), ErrorCode::kPeerDown);
}

// --- Two threads

// The polling thread gives the device nothing that takes longer than a doorbell. Under ThreadSanitizer, this test also
// detects state that the two halves share wrongly.
TEST(VerbsEnds, OnlyTheControlThreadBlocks) {
  TwoNics nics;
  ControlThread control([] {});
  test::must(control.start("test"));
  struct Side {
    OpenedDomain opened;
    std::vector<std::byte> memory = std::vector<std::byte>(1 << 16);
    std::unique_ptr<Registration> region;
    Record record;

    void poll() {
      opened.domain->poll();
      opened.domain->completions().drain([this](Completion& completion) {
        if (completion.kind == Completion::Kind::kWork) {
          record.completed[completion.work()] =
              completion.error() == nullptr ? std::nullopt : std::optional(*completion.error());
        } else if (completion.kind == Completion::Kind::kImmediate) {
          record.counted += Immediate::decode(completion.immediate()).multiplicity;
        } else if (completion.kind == Completion::Kind::kMessage) {
          opened.domain->take(completion.link, completion.slot());
        }
      });
      opened.domain->prepare_sleep();
    }
  };
  Side a;
  Side b;
  for (Side* side : {&a, &b}) {
    DomainConfig config;
    config.device = side == &a ? "nic0" : "nic1";
    side->opened = test::must(
        control.call([&] { return VerbsConnector::open(config, control, fake::Fabric::library(), Tuning{}); }));
  }
  nics.may_not_block = std::this_thread::get_id();
  const auto until = [&](auto&& done) {
    const auto limit = Clock::now() + test::kLimit;
    while (!done()) {
      ASSERT_LT(Clock::now(), limit);
      a.poll();
      b.poll();
    }
  };
  constexpr LinkId kLinks = 30;
  for (LinkId link = 1; link <= kLinks; ++link) {
    for (Side* side : {&a, &b}) {
      const MemoryRange range{side->memory.data(), side->memory.size()};
      side->region = test::must(control.call([&] { return side->opened.connector->register_memory(range); }));
      side->opened.domain->publish(*side->region);
    }
    const Bytes offer = test::must(control.call([&] { return a.opened.connector->offer(link); }));
    Connector::Accepted accepted =
        test::must(control.call([&] { return b.opened.connector->accept(1000 + link, offer); }));
    b.opened.domain->attach(1000 + link, std::move(accepted.end));
    a.opened.domain->attach(
        link, test::must(control.call([&] { return a.opened.connector->complete(link, accepted.answer); })));
    const PageWrite page{a.memory.data(), 4096};
    WriteBatch batch;
    batch.work = link;
    batch.source = a.region.get();
    batch.rkey = b.region->key;
    batch.target_base = reinterpret_cast<uint64_t>(b.memory.data());
    batch.page_bytes = 4096;
    batch.counted = true;
    batch.immediate = immediate_of(1);
    batch.pages = {&page, 1};
    ASSERT_EQ(a.opened.domain->post(link, batch), Posted::kYes);
    ASSERT_EQ(a.opened.domain->send(link, 1000 + link, Bytes(9, std::byte{1})), Posted::kYes);
    until([&] { return a.record.succeeded(link) && a.record.succeeded(1000 + link) && b.record.counted == link; });
    if (link < kLinks) {  // the last one ends with the domains
      until([&] { return b.opened.domain->fence(1000 + link); });
      until([&] { return a.opened.domain->fence(link); });
    }
    for (Side* side : {&a, &b}) {
      until([&] { return side->opened.domain->withdraw(*side->region); });
      control.dispose(std::move(side->region));
    }
  }
  for (Side* side : {&a, &b}) {
    side->opened.domain.reset();
    control.dispose(std::move(side->opened.connector));
  }
}

}  // namespace
}  // namespace kvc::verbs
