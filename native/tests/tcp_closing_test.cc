// How links of the tcp provider end, and how they begin late: goodbyes, sockets that linger, connections that arrive
// after the answer, and the two halves on separate threads.
#include <algorithm>
#include <thread>

#include "engine/control_thread.h"
#include "providers/tcp/lingering_sockets.h"
#include "tcp_test_support.h"

namespace kvc::tcp {
namespace {

constexpr auto kLimitMs = std::chrono::duration_cast<std::chrono::milliseconds>(test::kLimit);

// --- A receiver that has counted, or has the message, ends the link at once: the sender must not see a failure.

struct Ending {
  const char* name;
  bool message;  // otherwise a counted write
  bool close;    // closes the whole domain, otherwise fences
  bool busy;     // the sender continues to write, so that unread bytes are in the receiver's sockets
};
void PrintTo(const Ending& ending, std::ostream* out) { *out << ending.name; }

class TcpLastWords : public testing::TestWithParam<Ending> {};

TEST_P(TcpLastWords, ReachTheSender) {
  const Ending ending = GetParam();
  for (int round = 0; round < 100; ++round) {
    Pair pair({}, 2, ending.busy ? 1 << 20 : 64 << 10);
    pair.connect();
    ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 100, .from = {0}, .to = {0}}), Posted::kYes);
    pair.run_until([&] { return pair.a.record().succeeded(100); }, "both ends are up");
    if (ending.message) {
      ASSERT_EQ(pair.a.domain->send(kLinkOfA, 1, Bytes(100, std::byte{7})), Posted::kYes);
    } else {
      ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
    }
    for (WorkId work = 2; ending.busy && work < 26; ++work) {
      ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = work, .page_bytes = 512 << 10, .from = {0}, .to = {0}}),
                Posted::kYes);
    }
    std::thread sender([&] { run_until({pair.a.domain.get()}, [&] { return !pair.a.record().down.empty(); }); });
    run_until({pair.b.domain.get()},
              [&] { return ending.message ? !pair.b.record().messages.empty() : pair.b.record().counted >= 2; });
    if (ending.close) {
      pair.b.domain.reset();
    } else {
      EXPECT_TRUE(pair.b.domain->fence(kLinkOfB));
    }
    sender.join();
    EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
    ASSERT_TRUE(pair.a.record().succeeded(1)) << "round " << round;
    ASSERT_EQ(pair.a.record().completed.size(), ending.busy ? 26U : 2U);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Endings, TcpLastWords,
    testing::Values(Ending{"write_fence", false, false, false}, Ending{"write_close", false, true, false},
                    Ending{"message_fence", true, false, false}, Ending{"message_close", true, true, false},
                    Ending{"busy_write_fence", false, false, true}, Ending{"busy_write_close", false, true, true},
                    Ending{"busy_message_fence", true, false, true}, Ending{"busy_message_close", true, true, true}),
    [](const auto& info) { return std::string(info.param.name); });

// Part of a frame of B is sent when A's write lands there and B fences.
void fence_inside_a_frame(Pair& pair, uint64_t page_bytes) {
  pair.connect();
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 100, .from = {0}, .to = {0}}), Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(100); });
  run_idle(pair.both());
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  EXPECT_TRUE(pair.a.domain->domain().poll());
  ASSERT_EQ(post(pair.b, kLinkOfB, pair.a, {.work = 2, .page_bytes = page_bytes, .from = {0}, .to = {1 << 20}}),
            Posted::kYes);
  // B alone, so that its socket fills as far as possible.
  run_until({pair.b.domain.get()}, [&] { return pair.b.record().counted == 2; });
  EXPECT_TRUE(pair.b.domain->fence(kLinkOfB));
  EXPECT_EQ(pair.b.record().failure(2), ErrorCode::kPeerDown);
  pair.run_until([&] { return !pair.a.record().down.empty(); });
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
}

TEST(TcpClosing, AFrameThatHasBegunIsFinishedForTheLastWords) {
  Tuning tuning;
  tuning.turn_bytes = 32 << 10;
  Pair pair(tuning, 1);
  pair.b.fill(3);
  fence_inside_a_frame(pair, 200'000);  // B's poll() sends it in four turns
  EXPECT_TRUE(pair.a.record().succeeded(1));
  EXPECT_EQ(pair.a.record().counted, 1U) << "the frame came whole";
  EXPECT_EQ(std::memcmp(pair.a.memory.data() + (1 << 20), pair.b.memory.data(), 200'000), 0);
}

TEST(TcpClosing, AFrameThatDoesNotFitIsLeftAlone) {
  Tuning tuning;
  tuning.socket_buffer = 16 << 10;
  Pair pair(tuning, 1);
  fence_inside_a_frame(pair, 2 << 20);
  EXPECT_EQ(pair.a.record().failure(1), ErrorCode::kPeerDown);
  EXPECT_EQ(pair.a.record().counted, 0U);
}

// Beyond any region of these tests: a write there ends its link.
constexpr uint64_t kOutside = uint64_t{1} << 40;

TEST(TcpClosing, ALinkThatFailsAcknowledgesWhatHasLandedOnTheOthers) {
  Pair pair;
  pair.connect();
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 100, .from = {0}, .to = {0}}), Posted::kYes);
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 101, .from = {0}, .to = {0}}), Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(100) && pair.a.record().succeeded(101); });
  run_idle(pair.both());
  // Each on a separate connection, and both have arrived before B polls.
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 2, .from = {0}, .to = {kOutside}}), Posted::kYes);
  EXPECT_TRUE(pair.a.domain->domain().poll());
  pair.run_until([&] { return !pair.a.record().down.empty() && !pair.b.record().down.empty(); });
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
  EXPECT_TRUE(pair.a.record().succeeded(1));
  EXPECT_EQ(pair.a.record().failure(2), ErrorCode::kOutOfRange);
}

TEST(TcpClosing, ARefusalAfterMessagesKeepsItsReason) {
  Pair pair({}, 1);
  pair.connect();
  ASSERT_EQ(pair.a.domain->send(kLinkOfA, 1, Bytes(10)), Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(1); });
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 2, .from = {0}, .to = {kOutside}}), Posted::kYes);
  pair.run_until([&] { return !pair.a.record().down.empty(); });
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
  EXPECT_EQ(pair.a.record().failure(2), ErrorCode::kOutOfRange);
}

// --- A peer driven by the test, with two connections that are up.

struct ByHand {
  explicit ByHand(const Tuning& tuning) : end(tuning, 2, 64 << 10) {
    offer = Offer::decode(end.domain->offer(kLinkOfA).value()).value();
    for (uint16_t index = 0; index < 2; ++index) {
      peer.push_back(RawSocket::dial(offer.port));
      peer.back().send(hello_for(offer, index));
    }
    EXPECT_TRUE(end.domain->complete(kLinkOfA, Answer{kLinkOfA, 2}.encode()).ok());
    for (RawSocket& one : peer) {
      run_until({end.domain.get()}, [&] { return one.readable(); });
      EXPECT_TRUE(one.receive<Welcome>().secret.equals(offer.listener));
    }
    run_idle({end.domain.get()});
  }

  End end;
  Offer offer;
  std::vector<RawSocket> peer;
};

TEST(TcpClosing, AllConnectionsAreReadToTheirEnd) {
  Tuning tuning;
  tuning.closing_timeout = kLimitMs * 2;
  ByHand two(tuning);
  for (WorkId work = 1; work <= 2; ++work) {
    ASSERT_EQ(post(two.end, kLinkOfA, two.end, {.work = work, .from = {0}, .to = {0}}), Posted::kYes);
  }
  run_until({two.end.domain.get()}, [&] { return two.peer[0].readable() && two.peer[1].readable(); });
  two.peer[0].close();
  run_idle({two.end.domain.get()});
  EXPECT_TRUE(two.end.record().down.empty()) << "the other one may still say something";
  FrameHeader ack;
  ack.acknowledged = 1;
  two.peer[1].send(ack);
  two.peer[1].close();
  run_until({two.end.domain.get()}, [&] { return !two.end.record().down.empty(); });
  EXPECT_TRUE(two.end.domain->fence(kLinkOfA));
  EXPECT_EQ(two.end.record().failure(1), ErrorCode::kPeerDown);
  EXPECT_TRUE(two.end.record().succeeded(2));
}

TEST(TcpClosing, ASilentConnectionIsNotWaitedForLong) {
  Tuning tuning;
  tuning.closing_timeout = std::chrono::milliseconds(30);
  ByHand two(tuning);
  two.peer[0].close();
  run_until({two.end.domain.get()}, [&] { return !two.end.record().down.empty(); });
  EXPECT_TRUE(two.peer[1].closed()) << "it was told";
  // Work posted before the fence ends with it.
  ASSERT_EQ(post(two.end, kLinkOfA, two.end, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  ASSERT_EQ(two.end.domain->send(kLinkOfA, 2, Bytes(1)), Posted::kYes);
  run_idle({two.end.domain.get()});
  EXPECT_TRUE(two.end.record().completed.empty());
  EXPECT_TRUE(two.end.domain->fence(kLinkOfA));
  EXPECT_EQ(two.end.record().failure(1), ErrorCode::kPeerDown);
  EXPECT_EQ(two.end.record().failure(2), ErrorCode::kPeerDown);
  EXPECT_EQ(two.end.record().down.size(), 1U);
}

TEST(TcpClosing, ASlotIsOneOfTheLinkNotOfItsConnections) {
  ByHand two(Tuning{});
  two.end.record().message_room = 0;
  FrameHeader header;
  header.type = FrameType::kMessage;
  header.count = 1;
  header.value = 5;
  for (RawSocket& one : two.peer) {
    one.send(header);
    one.send(std::byte{1});
    run_idle({two.end.domain.get()});
  }
  EXPECT_TRUE(two.peer[1].readable());
  EXPECT_EQ(two.peer[1].receive<FrameHeader>().type, FrameType::kRefusal);
}

TEST(TcpClosing, APeerThatStillWritesIsNotReset) {
  ByHand two(Tuning{});
  EXPECT_TRUE(two.end.domain->fence(kLinkOfA));
  for (RawSocket& one : two.peer) {
    run_until({two.end.domain.get()}, [&] { return one.closed(); }, "the end of our direction");
    one.send(std::span<const std::byte>(std::vector<std::byte>(100'000)));
    run_idle({two.end.domain.get()});
    EXPECT_FALSE(one.gone());
    ::shutdown(one.fd(), SHUT_WR);
    run_until({two.end.domain.get()}, [&] { return one.gone(); });
    EXPECT_EQ(one.error(), 0) << "ended in good order";
  }
}

// --- Sockets that linger.

// `count` connections. This side has shut down its direction, as a link does at its end.
struct Left {
  explicit Left(size_t count) {
    const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in name = loopback(0);
    socklen_t length = sizeof(name);
    EXPECT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&name), length), 0);
    EXPECT_EQ(::listen(listener.get(), 16), 0);
    EXPECT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&name), &length), 0);
    for (size_t i = 0; i < count; ++i) {
      peer.push_back(RawSocket::dial(ntohs(name.sin_port)));
      ours.emplace_back(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      ::shutdown(ours.back().get(), SHUT_WR);
    }
  }
  std::vector<RawSocket> peer;
  std::vector<UniqueFd> ours;
};

void serve_until(LingeringSockets& lingering, const std::function<bool()>& done) {
  const auto limit = std::chrono::steady_clock::now() + test::kLimit;
  while (!done()) {
    ASSERT_LT(std::chrono::steady_clock::now(), limit);
    pollfd entry{lingering.fd(), POLLIN, 0};
    if (::poll(&entry, 1, 20) == 1) lingering.serve();
  }
}

TEST(TcpLingering, ReadsThePeerToItsEnd) {
  Tuning tuning;
  tuning.closing_timeout = kLimitMs * 2;
  const auto lingering = LingeringSockets::create(tuning).value();
  Left left(1);
  lingering->add(std::move(left.ours[0]));
  EXPECT_EQ(lingering->size(), 1U);
  // More than any buffer holds, so that it is only sent if the receiver reads. A reset would fail it.
  std::thread sender([&] {
    const std::vector<std::byte> part(1 << 20);
    for (int i = 0; i < 64; ++i) left.peer[0].send(std::span(part));
    ::shutdown(left.peer[0].fd(), SHUT_WR);
  });
  serve_until(*lingering, [&] { return lingering->size() == 0; });
  sender.join();
  std::byte byte;
  EXPECT_EQ(::recv(left.peer[0].fd(), &byte, 1, 0), 0) << "ended in good order";
}

TEST(TcpLingering, NotForEver) {
  Tuning tuning;
  tuning.closing_timeout = std::chrono::milliseconds(30);
  const auto lingering = LingeringSockets::create(tuning).value();
  Left left(2);
  for (UniqueFd& socket : left.ours) lingering->add(std::move(socket));
  serve_until(*lingering, [&] { return lingering->size() == 0; });
  EXPECT_TRUE(left.peer[0].gone() && left.peer[1].gone());
  pollfd entry{lingering->fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 0), 0) << "nothing is left to do";
}

TEST(TcpLingering, NotWithoutBound) {
  Tuning tuning;
  tuning.max_lingering = 3;
  const auto lingering = LingeringSockets::create(tuning).value();
  Left left(5);
  for (UniqueFd& socket : left.ours) lingering->add(std::move(socket));
  EXPECT_EQ(lingering->size(), 3U);
  EXPECT_TRUE(left.peer[0].gone() && left.peer[1].gone());
  EXPECT_FALSE(left.peer[2].gone() || left.peer[3].gone() || left.peer[4].gone());
}

TEST(TcpLingering, AnEndedConnectionIsNotKept) {
  const auto lingering = LingeringSockets::create(Tuning{}).value();
  Left left(1);
  left.peer[0].close();
  run_until({}, [&] {
    pollfd entry{left.ours[0].get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  });
  lingering->add(std::move(left.ours[0]));
  EXPECT_EQ(lingering->size(), 0U);
}

// --- Connections that arrive late.

TEST(TcpArrivals, BeforeTheAnswerAndAfterIt) {
  End end({}, 2, 64 << 10);
  const Offer offer = Offer::decode(end.domain->offer(kLinkOfA).value()).value();
  std::vector<RawSocket> peer;
  const auto dial = [&](uint16_t index) {
    peer.push_back(RawSocket::dial(offer.port));
    peer.back().send(hello_for(offer, index));
    run_until({end.domain.get()}, [&] { return peer.back().readable(); });
    EXPECT_EQ(peer.back().receive<Welcome>().index, index);
  };
  dial(1);
  RawSocket twice = RawSocket::dial(offer.port);
  twice.send(hello_for(offer, 1));
  run_until({end.domain.get()}, [&] { return twice.closed(); }, "the secret opens each connection once");
  ASSERT_TRUE(end.domain->complete(kLinkOfA, Answer{kLinkOfA, 2}.encode()).ok());
  dial(0);
  for (WorkId work = 1; work <= 2; ++work) {
    ASSERT_EQ(post(end, kLinkOfA, end, {.work = work, .from = {0}, .to = {0}}), Posted::kYes);
  }
  run_until({end.domain.get()}, [&] { return peer[0].readable() && peer[1].readable(); }, "both carry frames");
}

TEST(TcpArrivals, TheDomainAloneEndsTheLinkAndItsSecretIsVoid) {
  End end({}, 2, 64 << 10);
  const Offer offer = Offer::decode(end.domain->offer(kLinkOfA).value()).value();
  ASSERT_TRUE(end.domain->complete(kLinkOfA, Answer{kLinkOfA, 2}.encode()).ok());
  EXPECT_TRUE(end.domain->domain().fence(kLinkOfA));
  RawSocket late = RawSocket::dial(offer.port);
  late.send(hello_for(offer));
  run_until({end.domain.get()}, [&] { return late.closed(); });
}

TEST(TcpArrivals, NotAfterTheDeadline) {
  Tuning tuning;
  tuning.connect_timeout = std::chrono::milliseconds(30);
  End end(tuning, 2, 64 << 10);
  const Offer offer = Offer::decode(end.domain->offer(kLinkOfA).value()).value();
  // The result is neither attached nor released.
  const auto kept = end.domain->connector().complete(kLinkOfA, Answer{kLinkOfA, 2}.encode());
  ASSERT_TRUE(kept.ok());
  pollfd entry{end.domain->connector().fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&entry, 1, kLimitMs.count()), 1);
  end.domain->connector().serve();
  RawSocket late = RawSocket::dial(offer.port);
  late.send(hello_for(offer));
  run_until({end.domain.get()}, [&] { return late.closed(); });
}

TEST(TcpArrivals, AWithdrawnOfferEndsWhatHasCome) {
  End end({}, 2, 64 << 10);
  const Offer offer = Offer::decode(end.domain->offer(kLinkOfA).value()).value();
  RawSocket early = RawSocket::dial(offer.port);
  early.send(hello_for(offer));
  run_until({end.domain.get()}, [&] { return early.readable(); });
  (void)early.receive<Welcome>();
  end.domain->connector().withdraw(kLinkOfA);
  end.domain->connector().withdraw(kLinkOfA);
  EXPECT_TRUE(early.closed());
}

// --- Both halves on separate threads, as in the transfer engine.

TEST(TcpThreads, LinksComeAndGoWhileTheControlThreadWorks) {
  std::vector<std::byte> memory(64 << 10);
  ControlThread control([] {});
  test::must(control.start("test"));
  DomainConfig config;
  OpenedDomain a = control.call([&] { return test::must(create(config, control)); });
  OpenedDomain b = control.call([&] { return test::must(create(config, control)); });
  const auto source = control.call([&] { return test::must(a.connector->register_memory({memory.data(), 32 << 10})); });
  const auto target =
      control.call([&] { return test::must(b.connector->register_memory({memory.data() + (32 << 10), 32 << 10})); });
  b.domain->publish(*target);
  control.run([&] {
    control.watch(*a.connector);
    control.watch(*b.connector);
  });
  for (LinkId link = 1; link <= 50; ++link) {
    const Bytes offer = control.call([&] { return test::must(a.connector->offer(link)); });
    Connector::Accepted accepted = control.call([&] { return test::must(b.connector->accept(link, offer)); });
    b.domain->attach(link, std::move(accepted.end));
    a.domain->attach(link, control.call([&] { return test::must(a.connector->complete(link, accepted.answer)); }));
    const PageWrite page{memory.data(), 0};
    WriteBatch batch;
    batch.work = link;
    batch.source = source.get();
    batch.rkey = target->key;
    batch.page_bytes = 4096;
    batch.counted = true;
    batch.immediate = test::immediate_of(1);
    batch.pages = {&page, 1};
    ASSERT_EQ(a.domain->post(link, batch), Posted::kYes);
    bool done = false;
    const auto limit = std::chrono::steady_clock::now() + test::kLimit;
    while (!done) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit);
      a.domain->poll();
      b.domain->poll();
      b.domain->completions().drain([](Completion&) {});
      a.domain->completions().drain([&](Completion& one) { done |= one.kind == Completion::Kind::kWork; });
    }
    EXPECT_TRUE((link % 2 == 0 ? a : b).domain->fence(link));
    EXPECT_TRUE((link % 2 == 0 ? b : a).domain->fence(link));
  }
  EXPECT_TRUE(b.domain->withdraw(*target));
  a.domain.reset();
  b.domain.reset();
  test::must(control.call([&]() -> Status {
    control.unwatch_all();
    return {};
  }));
}

}  // namespace
}  // namespace kvc::tcp
