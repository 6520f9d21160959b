// The tcp provider: two domains that follow the protocol.
#include <algorithm>
#include <random>

#include "tcp_test_support.h"

namespace kvc::tcp {
namespace {

// Applies `batch` to `memory`, which gives the expected contents of B's memory.
void apply(std::vector<std::byte>& memory, const std::vector<std::byte>& source, const Batch& batch) {
  for (size_t i = 0; i < batch.to.size(); ++i) {
    std::memcpy(memory.data() + batch.to[i], source.data() + batch.from[i], batch.page_bytes);
  }
}

// `count` pages in shuffled, disjoint slots of `stride` bytes on both sides.
Batch scattered(WorkId work, uint64_t page_bytes, size_t count, uint64_t stride, size_t memory) {
  Batch batch;
  batch.work = work;
  batch.page_bytes = page_bytes;
  for (const auto& [side, seed] : {std::pair{&batch.from, 3}, {&batch.to, 4}}) {
    for (const int64_t slot : test::shuffled(count, memory / stride, seed)) {
      side->push_back(static_cast<uint64_t>(slot) * stride);
    }
  }
  return batch;
}

struct Shape {
  uint64_t page_bytes;
  size_t pages;
};

class TcpShapes : public testing::TestWithParam<Shape> {};

TEST_P(TcpShapes, PagesArriveInPlaceAndNothingElseChanges) {
  const Shape shape = GetParam();
  Pair pair({}, 2, 8 << 20);
  pair.a.fill(1);
  pair.b.fill(2);
  pair.connect();
  std::vector<std::byte> expected = pair.b.memory;
  const Batch batch = scattered(1, shape.page_bytes, shape.pages, shape.page_bytes + 5, expected.size());
  apply(expected, pair.a.memory, batch);
  pair.b.domain->on_completion = [&](const Completion&) {
    EXPECT_TRUE(test::same(pair.b.memory, expected)) << "counted before all bytes were in place";
  };
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, batch), Posted::kYes);
  pair.run_until([&] { return !pair.a.record().completed.empty(); }, "completion");
  EXPECT_TRUE(pair.a.record().succeeded(1));
  EXPECT_TRUE(test::same(pair.b.memory, expected));
  EXPECT_EQ(pair.b.record().counted, shape.pages);
  EXPECT_EQ(pair.b.record().immediates, std::vector{(Immediate{7, 3, static_cast<uint32_t>(shape.pages)}.encode())});
}

INSTANTIATE_TEST_SUITE_P(Sizes, TcpShapes,
                         testing::Values(Shape{1, 1}, Shape{1, 64}, Shape{7, 3}, Shape{4095, 2}, Shape{4096, 1},
                                         Shape{4096, 64}, Shape{8135, 1}, Shape{8136, 1}, Shape{8137, 1},
                                         Shape{65536, 64}, Shape{262144, 7}, Shape{(3 << 20) + 1, 2}));

TEST(Tcp, ManyBatchesBothWaysThroughTinyBuffers) {
  Tuning tuning;
  tuning.socket_buffer = 4096;  // the kernel makes it a few KiB: every frame is sent and received in pieces
  tuning.turn_bytes = 1000;
  Pair pair(tuning, 3, 1 << 20);
  // The lower half of each memory is only read, the upper half only written.
  const size_t half = pair.a.memory.size() / 2;
  pair.a.fill(1);
  pair.b.fill(2);
  pair.connect();
  std::mt19937 random(5);
  std::vector<std::byte> expected_a = pair.a.memory;
  std::vector<std::byte> expected_b = pair.b.memory;
  uint64_t pages_to_a = 0;
  uint64_t pages_to_b = 0;
  // Batches may land in any order, so every page has its own place.
  uint64_t next_a = half;
  uint64_t next_b = half;
  for (WorkId work = 1; work <= 60; ++work) {
    for (const bool to_b : {true, false}) {
      Batch batch;
      batch.work = work;
      batch.page_bytes = 1 + random() % 300;
      const size_t count = 1 + random() % 20;
      uint64_t& next = to_b ? next_b : next_a;
      for (size_t i = 0; i < count; ++i) {
        batch.from.push_back(random() % (half - batch.page_bytes));
        batch.to.push_back(next);
        next += batch.page_bytes + random() % 3;
      }
      End& source = to_b ? pair.a : pair.b;
      End& target = to_b ? pair.b : pair.a;
      apply(to_b ? expected_b : expected_a, source.memory, batch);
      (to_b ? pages_to_b : pages_to_a) += count;
      pair.run_until([&] { return post(source, to_b ? kLinkOfA : kLinkOfB, target, batch) == Posted::kYes; }, "room");
    }
  }
  pair.run_until([&] { return pair.a.record().order.size() == 60 && pair.b.record().order.size() == 60; },
                 "all completions");
  EXPECT_TRUE(test::same(pair.a.memory, expected_a));
  EXPECT_TRUE(test::same(pair.b.memory, expected_b));
  EXPECT_EQ(pair.a.record().counted, pages_to_a);
  EXPECT_EQ(pair.b.record().counted, pages_to_b);
  for (WorkId work = 1; work <= 60; ++work)
    EXPECT_TRUE(pair.a.record().succeeded(work) && pair.b.record().succeeded(work));
}

TEST(Tcp, AFrameThatEndsWithATurnIsAcknowledged) {
  // The header arrives with 8192 bytes of inbox, and the frame takes exactly the remaining bytes of the turn.
  constexpr uint64_t kHead = sizeof(FrameHeader) + 8;
  Tuning tuning;
  tuning.turn_bytes = 20'000;
  Pair pair(tuning, 1);
  pair.connect();
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(1); });
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 2, .page_bytes = 20'000 - kHead, .from = {0}, .to = {0}}),
            Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(2); });
}

TEST(Tcp, CompletionMeansTheBytesAreThere) {
  Pair pair;
  pair.a.fill(1);
  pair.connect();
  pair.a.domain->on_completion = [&](const Completion&) {
    EXPECT_EQ(std::memcmp(pair.b.memory.data(), pair.a.memory.data(), 4096), 0);
    EXPECT_EQ(pair.b.record().counted, 1U);
  };
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.from = {0}, .to = {0}}), Posted::kYes);
  EXPECT_TRUE(pair.a.record().completed.empty());
  pair.run_until([&] { return pair.a.record().succeeded(1); });
}

TEST(Tcp, CompletesInOrderOnOneConnection) {
  Pair pair({}, 1);
  pair.connect();
  std::vector<WorkId> posted;
  for (WorkId work = 1; work <= 50; ++work) {
    ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = work, .page_bytes = 5000 * work, .from = {0}, .to = {0}}),
              Posted::kYes);
    posted.push_back(work);
  }
  pair.run_until([&] { return pair.a.record().order.size() == posted.size(); });
  EXPECT_EQ(pair.a.record().order, posted);
}

TEST(Tcp, UncountedWriteRaisesNothing) {
  Pair pair;
  pair.a.fill(1);
  pair.connect();
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.from = {0}, .to = {8192}, .counted = false}), Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(1); });
  EXPECT_EQ(std::memcmp(pair.b.memory.data() + 8192, pair.a.memory.data(), 4096), 0);
  EXPECT_TRUE(pair.b.record().immediates.empty());
}

TEST(Tcp, PostsBeforeTheConnectionsAreUp) {
  Pair pair;
  pair.a.fill(1);
  const Bytes offer = pair.a.domain->offer(kLinkOfA).value();
  const Bytes answer = pair.b.domain->accept(kLinkOfB, offer).value();
  ASSERT_EQ(post(pair.b, kLinkOfB, pair.a, {.work = 1, .from = {0}, .to = {4096}}), Posted::kYes);
  ASSERT_TRUE(pair.a.domain->complete(kLinkOfA, answer).ok());
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 1, .from = {0}, .to = {4096}}), Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(1) && pair.b.record().succeeded(1); });
  EXPECT_EQ(std::memcmp(pair.b.memory.data() + 4096, pair.a.memory.data(), 4096), 0);
}

TEST(Tcp, TheSideWithFewerConnectionsDecides) {
  Pair pair;
  End few({}, 1);
  const Bytes offer = pair.a.domain->offer(kLinkOfA).value();
  const Bytes answer = few.domain->accept(kLinkOfB, offer).value();
  ASSERT_TRUE(pair.a.domain->complete(kLinkOfA, answer).ok());
  for (WorkId work = 1; work <= 4; ++work) {
    ASSERT_EQ(post(pair.a, kLinkOfA, few, {.work = work, .from = {0}, .to = {work * 4096}}), Posted::kYes);
  }
  run_until({pair.a.domain.get(), few.domain.get()}, [&] { return pair.a.record().order.size() == 4; });
  EXPECT_EQ(few.record().counted, 4U);
}

TEST(Tcp, BusyUntilSomethingCompleted) {
  Tuning tuning;
  tuning.queue_bytes = 10'000;
  Pair pair(tuning, 1);
  pair.connect();
  WorkId work = 0;
  while (post(pair.a, kLinkOfA, pair.b, {.work = work + 1, .from = {0}, .to = {0}}) == Posted::kYes) ++work;
  EXPECT_EQ(work, 3U) << "three pages of 4096 bytes reach 10,000";
  EXPECT_TRUE(pair.a.record().completed.empty());
  pair.run_until([&] { return !pair.a.record().completed.empty(); });
  EXPECT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 9, .from = {0}, .to = {0}}), Posted::kYes);
  pair.run_until([&] { return pair.a.record().order.size() == 4; });
  EXPECT_EQ(pair.b.record().counted, 4U);
}

TEST(Tcp, BusyByNumberOfBatches) {
  Tuning tuning;
  tuning.queue_batches = 5;
  Pair pair(tuning, 1);
  pair.connect();
  WorkId work = 0;
  while (post(pair.a, kLinkOfA, pair.b, {.work = work + 1, .page_bytes = 1, .from = {0}, .to = {0}}) == Posted::kYes)
    ++work;
  EXPECT_EQ(work, 5U);
}

TEST(Tcp, ABatchOnALinkThatIsNotThereFails) {
  Pair pair;
  pair.connect();
  EXPECT_EQ(post(pair.a, 999, pair.b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  EXPECT_EQ(pair.a.record().failure(1), ErrorCode::kPeerDown);
  EXPECT_TRUE(pair.a.record().down.empty());
}

TEST(Tcp, WrongKeyFailsThatBatchWithTheReason) {
  Pair pair;
  pair.a.fill(1);
  pair.connect();
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(1); });
  const std::vector<std::byte> before = pair.b.memory;
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 2, .from = {0}, .to = {4096}, .rkey = pair.b.rkey ^ 1}),
            Posted::kYes);
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b,
                 {.work = 3, .page_bytes = 1 << 20, .from = {0}, .to = {4096}, .rkey = pair.b.rkey ^ 1}),
            Posted::kYes);
  pair.run_until([&] { return pair.a.record().completed.size() == 3; });
  EXPECT_EQ(pair.a.record().failure(2), ErrorCode::kUnknownRegion);
  EXPECT_EQ(pair.a.record().failure(3), ErrorCode::kUnknownRegion);
  EXPECT_TRUE(pair.b.memory == before);
  EXPECT_EQ(pair.b.record().counted, 1U);
  EXPECT_TRUE(pair.a.record().down.empty());
  EXPECT_TRUE(pair.b.record().down.empty());
}

TEST(Tcp, OutOfRangeFailsThatBatchWithTheReason) {
  for (const uint64_t offset :
       std::initializer_list<uint64_t>{(4 << 20) - 4095, 4 << 20, UINT64_MAX - 4095, UINT64_MAX}) {
    Pair pair({}, 1);
    pair.a.fill(1);
    const std::vector<std::byte> before = pair.b.memory;
    pair.connect();
    ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 1, .from = {0, 0}, .to = {0, offset}}), Posted::kYes);
    pair.run_until([&] { return !pair.a.record().down.empty() && !pair.b.record().down.empty(); });
    EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
    EXPECT_EQ(pair.a.record().failure(1), ErrorCode::kOutOfRange) << offset;
    EXPECT_TRUE(pair.b.memory == before) << "not even the page that was in range";
  }
}

TEST(Tcp, AHostileLinkCostsOtherLinksNothing) {
  Pair pair;
  pair.connect();
  End other;
  const Bytes offer = pair.b.domain->offer(33).value();
  const Bytes answer = other.domain->accept(44, offer).value();
  ASSERT_TRUE(pair.b.domain->complete(33, answer).ok());
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.from = {0}, .to = {UINT64_MAX}}), Posted::kYes);
  const std::vector<Driven*> all{pair.a.domain.get(), pair.b.domain.get(), other.domain.get()};
  run_until(all, [&] { return !pair.b.record().down.empty(); });
  ASSERT_EQ(post(other, 44, pair.b, {.work = 5, .from = {0}, .to = {0}}), Posted::kYes);
  run_until(all, [&] { return other.record().succeeded(5); });
  ASSERT_EQ(pair.b.record().down.size(), 1U);
  EXPECT_EQ(pair.b.record().down[0].link, kLinkOfB);
}

TEST(Tcp, ARevokedKeyIsRefused) {
  Pair pair;
  pair.a.fill(1);
  pair.connect();
  EXPECT_TRUE(pair.b.domain->deregister_region(pair.b.rkey));
  EXPECT_TRUE(pair.b.domain->deregister_region(pair.b.rkey)) << "idempotent";
  const uint64_t other = pair.b.domain->register_region(pair.b.memory.data(), 64 << 10).value();
  const std::vector<std::byte> before = pair.b.memory;
  // All kinds of batches together, on connections that carry both directions. The last ones are longer than an inbox.
  constexpr WorkId kRounds = 40;
  for (WorkId round = 0; round < kRounds; ++round) {
    const uint64_t bytes = round < kRounds / 2 ? 4096 : 128 << 10;
    ASSERT_EQ(
        post(pair.a, kLinkOfA, pair.b, {.work = 3 * round + 1, .page_bytes = bytes, .from = {8192}, .to = {8192}}),
        Posted::kYes);
    ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 3 * round + 2, .from = {0}, .to = {0}, .rkey = other}),
              Posted::kYes);
    ASSERT_EQ(pair.a.domain->send(kLinkOfA, 3 * round + 3, Bytes(10)), Posted::kYes);
    pair.run_until([&] { return pair.a.record().succeeded(3 * round + 3) || round % 8 != 7; });
  }
  pair.run_until([&] { return pair.a.record().completed.size() == 3 * kRounds; });
  for (WorkId round = 0; round < kRounds; ++round) {
    EXPECT_EQ(pair.a.record().failure(3 * round + 1), ErrorCode::kUnknownRegion);
    EXPECT_TRUE(pair.a.record().succeeded(3 * round + 2));
    EXPECT_TRUE(pair.a.record().succeeded(3 * round + 3));
  }
  EXPECT_EQ(pair.b.record().counted, kRounds) << "none of the refused ones";
  EXPECT_TRUE(test::same(std::span(pair.b.memory).subspan(4096), std::span(before).subspan(4096)));
  EXPECT_TRUE(pair.a.record().down.empty());
  EXPECT_TRUE(pair.b.record().down.empty());
}

// A peer that reports a later batch knows that an earlier one was refused, also in the last frame of a connection.
TEST(Tcp, NoLastWordsMakeARefusedBatchDone) {
  Tuning tuning;
  tuning.socket_buffer = 16 << 10;
  Pair pair(tuning, 1);
  pair.connect();
  ASSERT_EQ(pair.a.domain->send(kLinkOfA, 100, Bytes(1)), Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(100); });
  EXPECT_TRUE(pair.b.domain->deregister_region(pair.b.rkey));
  for (WorkId work = 1; work <= 64; ++work) {
    ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = work, .page_bytes = 512, .from = {0}, .to = {0}}), Posted::kYes);
  }
  EXPECT_TRUE(pair.a.domain->domain().poll());
  EXPECT_TRUE(pair.b.domain->domain().poll());
  EXPECT_TRUE(pair.b.domain->fence(kLinkOfB));
  pair.run_until([&] { return !pair.a.record().down.empty(); });
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
  for (WorkId work = 1; work <= 64; ++work) EXPECT_FALSE(pair.a.record().succeeded(work)) << work;
}

TEST(Tcp, NoPeerWaitsForAnother) {
  constexpr size_t kPeers = 6;
  constexpr size_t kBatches = 32;
  Tuning tuning;
  tuning.turns = 2;
  End target(tuning);
  std::vector<std::unique_ptr<End>> peers;
  std::vector<Driven*> all{target.domain.get()};
  for (LinkId id = 1; id <= kPeers; ++id) {
    peers.push_back(std::make_unique<End>(tuning, 1));
    all.push_back(peers.back()->domain.get());
    const Bytes answer = peers.back()->domain->accept(id, target.domain->offer(id).value()).value();
    ASSERT_TRUE(target.domain->complete(id, answer).ok());
    for (WorkId work = 1; work <= kBatches; ++work) {
      ASSERT_EQ(post(*peers.back(), id, target, {.work = work, .page_bytes = 256 << 10, .from = {0}, .to = {0}}),
                Posted::kYes);
    }
  }
  const auto done = [](const std::unique_ptr<End>& peer) { return peer->record().order.size(); };
  run_until(all, [&] { return std::any_of(peers.begin(), peers.end(), [&](auto& p) { return done(p) == kBatches; }); });
  for (const auto& peer : peers) EXPECT_GT(done(peer), kBatches / 2);
  run_until(all, [&] { return std::all_of(peers.begin(), peers.end(), [&](auto& p) { return done(p) == kBatches; }); });
}

TEST(Tcp, FenceCompletesWhatIsPostedAndTellsThePeer) {
  Pair pair;
  pair.connect();
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(1); });
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 2, .from = {0}, .to = {0}}), Posted::kYes);
  ASSERT_EQ(post(pair.b, kLinkOfB, pair.a, {.work = 3, .from = {0}, .to = {0}}), Posted::kYes);
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
  EXPECT_EQ(pair.a.record().completed.at(2)->code, ErrorCode::kPeerDown);
  EXPECT_TRUE(pair.a.record().down.empty()) << "a fence is not reported to the one who asked for it";
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA)) << "idempotent";
  pair.run_until([&] { return !pair.b.record().down.empty(); });
  EXPECT_TRUE(pair.b.domain->fence(kLinkOfB));
  EXPECT_EQ(pair.b.record().failure(3), ErrorCode::kPeerDown);
  EXPECT_EQ(pair.b.record().down[0].link, kLinkOfB);
  EXPECT_EQ(pair.a.record().counted, 0U);
}

TEST(Tcp, SleepProtocol) {
  Pair pair;
  pair.connect();
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(1); });
  run_idle(pair.both());
  const auto readable = [](const End& end) {
    pollfd fd{end.domain->domain().fd(), POLLIN, 0};
    return ::poll(&fd, 1, 0) == 1;
  };
  EXPECT_TRUE(pair.a.domain->prepare_sleep() && pair.b.domain->prepare_sleep());
  EXPECT_FALSE(readable(pair.a) || readable(pair.b)) << "idle domains let their worker sleep";
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 2, .from = {0}, .to = {0}}), Posted::kYes);
  EXPECT_FALSE(pair.a.domain->prepare_sleep());
  while (!pair.a.domain->prepare_sleep()) EXPECT_TRUE(pair.a.domain->poll());
  EXPECT_TRUE(readable(pair.b));
  while (readable(pair.b) || !pair.b.domain->prepare_sleep()) EXPECT_TRUE(pair.b.domain->poll());
  EXPECT_TRUE(readable(pair.a)) << "the acknowledgement";
  EXPECT_TRUE(pair.a.domain->poll());
  EXPECT_TRUE(pair.a.record().succeeded(2));
}

TEST(Tcp, AFullSocketSleepsUntilThereIsRoom) {
  Tuning tuning;
  tuning.socket_buffer = 16 << 10;
  Pair pair(tuning, 1);
  pair.connect();
  pair.run_until([&] {
    run_idle(pair.both());
    return true;
  });
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 1, .page_bytes = 2 << 20, .from = {0}, .to = {0}}), Posted::kYes);
  run_idle({pair.a.domain.get()});
  EXPECT_TRUE(pair.a.domain->prepare_sleep());
  pollfd fd{pair.a.domain->domain().fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&fd, 1, 0), 0) << "nothing to do before the peer reads";
  EXPECT_TRUE(pair.a.record().completed.empty());
  pair.run_until([&] { return pair.a.record().succeeded(1); });
}

TEST(Tcp, DialFailureHasTheKernelsWords) {
  Pair pair;
  Offer offer = Offer::decode(pair.a.domain->offer(kLinkOfA).value()).value();
  pair.a.domain.reset();  // no process listens there any more
  ASSERT_TRUE(pair.b.domain->accept(kLinkOfB, offer.encode()).ok());
  ASSERT_EQ(post(pair.b, kLinkOfB, pair.a, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  run_until({pair.b.domain.get()}, [&] { return !pair.b.record().down.empty(); });
  EXPECT_TRUE(pair.b.domain->fence(kLinkOfB));
  EXPECT_EQ(pair.b.record().failure(1), ErrorCode::kPeerDown);
  EXPECT_NE(pair.b.record().down[0].error.message.find("Connection refused"), std::string::npos)
      << pair.b.record().down[0].error.to_string();
}

TEST(Tcp, AnAnswerWithoutConnectionsTimesOut) {
  Tuning tuning;
  tuning.connect_timeout = std::chrono::milliseconds(30);
  End a(tuning);
  ASSERT_TRUE(a.domain->offer(kLinkOfA).ok());
  ASSERT_TRUE(a.domain->complete(kLinkOfA, Answer{kLinkOfA, 2}.encode()).ok());
  run_until({a.domain.get()}, [&] { return !a.record().down.empty(); });
  EXPECT_EQ(a.record().down[0].error.code, ErrorCode::kPeerDown);
  EXPECT_EQ(a.domain->complete(kLinkOfA, Answer{kLinkOfA, 2}.encode()).error().code, ErrorCode::kUnknownPeer);
}

TEST(Tcp, ALinkWithinItsDeadlineStays) {
  Tuning tuning;
  tuning.connect_timeout = std::chrono::milliseconds(30);
  Pair pair(tuning);
  pair.connect();
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(1); });
  // Past the deadline: a second link with the same timeout has just expired.
  ASSERT_TRUE(pair.a.domain->offer(99).ok());
  ASSERT_TRUE(pair.a.domain->complete(99, Answer{99, 1}.encode()).ok());
  pair.run_until([&] { return !pair.a.record().down.empty(); });
  EXPECT_EQ(pair.a.record().down.size(), 1U);
  EXPECT_EQ(pair.a.record().down[0].link, 99U);
  EXPECT_TRUE(pair.b.record().down.empty());
}

TEST(Tcp, SeveralLinksOfOneDomainToItself) {
  End one;
  one.fill(1);
  const Bytes offer = one.domain->offer(1).value();
  const Bytes answer = one.domain->accept(2, offer).value();
  ASSERT_TRUE(one.domain->complete(1, answer).ok());
  ASSERT_EQ(post(one, 2, one, {.work = 1, .from = {0}, .to = {1 << 20}}), Posted::kYes);
  run_until({one.domain.get()}, [&] { return one.record().succeeded(1); });
  EXPECT_EQ(std::memcmp(one.memory.data(), one.memory.data() + (1 << 20), 4096), 0);
}

TEST(Tcp, IPv6) {
  DomainConfig config;
  config.address = "::1";
  test::ManualControl control;
  if (auto probe = create(config, control); !probe)
    GTEST_SKIP() << "needs an IPv6 loopback address: " << probe.error().to_string();
  End a({}, 2, 1 << 20, "::1");
  End b({}, 2, 1 << 20, "::1");
  EXPECT_EQ(a.domain->connector().description().substr(0, 10), "tcp [::1]:");
  const Bytes answer = b.domain->accept(kLinkOfB, a.domain->offer(kLinkOfA).value()).value();
  ASSERT_TRUE(a.domain->complete(kLinkOfA, answer).ok());
  ASSERT_EQ(post(a, kLinkOfA, b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().succeeded(1); });
}

TEST(Tcp, RefusesABadConfiguration) {
  test::ManualControl control;
  const auto code = [&](const std::string& address, uint32_t connections) {
    DomainConfig config;
    config.address = address;
    config.connections = connections;
    auto domain = create(config, control);
    return domain ? std::nullopt : std::optional(domain.error().code);
  };
  EXPECT_EQ(code("127.0.0.1", 2), std::nullopt);
  EXPECT_EQ(code("127.0.0.1", 0), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code("127.0.0.1", 17), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code("0.0.0.0", 2), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code("::", 2), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code("localhost", 2), ErrorCode::kInvalidArgument) << "no name is looked up";
  EXPECT_EQ(code("", 2), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code("192.0.2.1", 2), ErrorCode::kSystem) << "an address that no machine has (RFC 5737)";
}

TEST(Tcp, RegionsHaveTheirOwnKeys) {
  End a;
  const Result<uint64_t> second = a.domain->register_region(a.memory.data(), 4096);
  ASSERT_TRUE(second.ok());
  EXPECT_NE(second.value(), a.rkey);
}

}  // namespace
}  // namespace kvc::tcp
