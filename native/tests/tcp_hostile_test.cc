// The tcp provider against strangers and faulty peers: raw sockets on the opposite side.
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <random>

#include "tcp_test_support.h"

namespace kvc::tcp {
namespace {

// A domain whose only peer is the test, which has shown the right secret and may then send anything.
class TcpHostile : public testing::Test {
 protected:
  void open(const Tuning& tuning = {}) {
    end = std::make_unique<End>(tuning, 1, 64 << 10);
    end->fill(1);
    before = end->memory;
    offer = Offer::decode(end->domain->offer(kLinkOfA).value()).value();
    peer.emplace(RawSocket::dial(offer.port));
    peer->send(hello_for(offer));
    ASSERT_TRUE(end->domain->complete(kLinkOfA, Answer{kLinkOfA, 1}.encode()).ok());
    wait_readable();
    const auto welcome = peer->receive<Welcome>();
    EXPECT_TRUE(welcome.secret.equals(offer.listener));
  }
  void wait_readable() {
    run_until({end->domain.get()}, [&] {
      pollfd fd{peer->fd(), POLLIN, 0};
      return ::poll(&fd, 1, 0) == 1;
    });
  }
  void wait_down() {
    run_until({end->domain.get()}, [&] { return !end->record().down.empty(); }, "link down");
    EXPECT_EQ(end->record().down.size(), 1U);
    EXPECT_TRUE(end->domain->fence(kLinkOfA)) << "which ends what is posted";
  }
  FrameHeader write_header(uint16_t pages = 1, uint64_t page_bytes = 4096) const {
    FrameHeader header;
    header.type = FrameType::kWrite;
    header.counted = 1;
    header.count = pages;
    header.sequence = 1;
    header.rkey = end->rkey;
    header.page_bytes = page_bytes;
    header.value = Immediate{7, 3, pages}.encode();
    return header;
  }

  std::unique_ptr<End> end;
  std::vector<std::byte> before;
  Offer offer;
  std::optional<RawSocket> peer;
};

TEST_F(TcpHostile, AFrameByHandIsWellUnderstood) {
  open();
  peer->send(write_header());
  peer->send(uint64_t{8192});
  const std::vector<std::byte> page(4096, std::byte{0xAB});
  for (size_t part = 0; part < 4; ++part) {  // in pieces, each received separately
    peer->send(std::span(page).subspan(part * 1024, 1024));
    run_until({end->domain.get()}, [&] { return end->memory[8192 + part * 1024 + 1023] == std::byte{0xAB}; });
    EXPECT_EQ(end->record().counted, part == 3 ? 1U : 0U);
  }
  wait_readable();
  EXPECT_EQ(peer->receive<FrameHeader>().acknowledged, 1U);
}

struct Malformed {
  const char* name;
  std::function<void(FrameHeader&)> spoil;
  ErrorCode code;
};
void PrintTo(const Malformed& malformed, std::ostream* out) { *out << malformed.name; }

class TcpMalformed : public TcpHostile, public testing::WithParamInterface<Malformed> {};

TEST_P(TcpMalformed, EndsTheLinkWithAReasonAndTouchesNothing) {
  open();
  ASSERT_EQ(post(*end, kLinkOfA, *end, {.work = 5, .from = {0}, .to = {0}, .rkey = 1}), Posted::kYes);
  wait_readable();
  const auto ours = peer->receive<FrameHeader>();
  EXPECT_EQ(ours.type, FrameType::kWrite);
  std::vector<std::byte> rest(8 + 4096);
  ASSERT_EQ(::recv(peer->fd(), rest.data(), rest.size(), MSG_WAITALL), static_cast<ssize_t>(rest.size()));
  FrameHeader header = write_header();
  GetParam().spoil(header);
  peer->send(header);
  peer->try_send(std::vector<std::byte>(4096 + 8));
  wait_down();
  EXPECT_EQ(end->record().down[0].error.code, ErrorCode::kPeerDown);
  EXPECT_EQ(end->record().completed.at(5)->code, ErrorCode::kPeerDown);
  EXPECT_TRUE(end->memory == before);
  EXPECT_TRUE(end->record().immediates.empty());
  const auto refusal = peer->receive<FrameHeader>();
  EXPECT_EQ(refusal.type, FrameType::kRefusal);
  EXPECT_EQ(refusal.value, static_cast<uint32_t>(GetParam().code));
  EXPECT_GT(refusal.count, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Headers, TcpMalformed,
    testing::Values(
        Malformed{"magic", [](FrameHeader& h) { h.magic ^= 1; }, ErrorCode::kInvalidArgument},
        Malformed{"type", [](FrameHeader& h) { h.type = static_cast<FrameType>(9); }, ErrorCode::kInvalidArgument},
        Malformed{"no_pages", [](FrameHeader& h) { h.count = 0; }, ErrorCode::kInvalidArgument},
        Malformed{"too_many_pages", [](FrameHeader& h) { h.count = 65; }, ErrorCode::kInvalidArgument},
        Malformed{"most_pages", [](FrameHeader& h) { h.count = 65535; }, ErrorCode::kInvalidArgument},
        Malformed{"taken_message", [](FrameHeader& h) { h.messages_taken = 1; }, ErrorCode::kInvalidArgument},
        Malformed{"taken_messages", [](FrameHeader& h) { h.messages_taken = ~0U; }, ErrorCode::kInvalidArgument},
        Malformed{"message_slot", [](FrameHeader& h) { h.type = FrameType::kMessage; }, ErrorCode::kInvalidArgument},
        Malformed{"empty_message",
                  [](FrameHeader& h) {
                    h.type = FrameType::kMessage;
                    h.value = h.count = 0;
                  },
                  ErrorCode::kInvalidArgument},
        Malformed{"long_message",
                  [](FrameHeader& h) {
                    h.type = FrameType::kMessage;
                    h.value = 0;
                    h.count = kMaxMessageBytes + 1;
                  },
                  ErrorCode::kInvalidArgument},
        Malformed{"immediate_out_of_step",
                  [](FrameHeader& h) {
                    h.page_bytes = 0;
                    h.sequence = 2;
                  },
                  ErrorCode::kInvalidArgument},
        Malformed{"multiplicity_of_an_immediate_alone",
                  [](FrameHeader& h) {
                    h.page_bytes = 0;
                    h.count = 2;
                  },
                  ErrorCode::kInvalidArgument},
        Malformed{"huge_pages", [](FrameHeader& h) { h.page_bytes = (1ULL << 40) + 1; }, ErrorCode::kInvalidArgument},
        Malformed{"overflowing_pages", [](FrameHeader& h) { h.page_bytes = UINT64_MAX; }, ErrorCode::kInvalidArgument},
        Malformed{"multiplicity", [](FrameHeader& h) { h.value += 1; }, ErrorCode::kInvalidArgument},
        Malformed{"counted", [](FrameHeader& h) { h.counted = 2; }, ErrorCode::kInvalidArgument},
        Malformed{"sequence", [](FrameHeader& h) { h.sequence = 2; }, ErrorCode::kInvalidArgument},
        Malformed{"acknowledged", [](FrameHeader& h) { h.acknowledged = 2; }, ErrorCode::kInvalidArgument},
        Malformed{"ack_with_body", [](FrameHeader& h) { h.type = FrameType::kAck; }, ErrorCode::kInvalidArgument},
        Malformed{"largest_pages", [](FrameHeader& h) { h.page_bytes = 1ULL << 40; }, ErrorCode::kOutOfRange}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(TcpHostile, MessagesAndImmediatesByHandAreWellUnderstood) {
  open();
  FrameHeader header;
  header.type = FrameType::kMessage;
  header.count = 5;
  header.value = 15;
  const auto text = [](const char* words) { return std::as_bytes(std::span(words, 5)); };
  for (const char* words : {"hello", "again"}) {
    peer->send(header);
    peer->send(text(words).first(2));  // in pieces
    run_idle({end->domain.get()});
    peer->send(text(words).subspan(2));
    wait_readable();
    EXPECT_EQ(peer->receive<FrameHeader>().messages_taken, words[0] == 'h' ? 1U << 15 : 0U);
    EXPECT_EQ(std::memcmp(end->record().messages.back().second.data(), words, 5), 0);
  }
  FrameHeader alone = write_header(3, 0);
  alone.rkey = 0;
  peer->send(alone);
  wait_readable();
  EXPECT_EQ(peer->receive<FrameHeader>().acknowledged, 1U);
  EXPECT_EQ(end->record().counted, 3U);
}

TEST_F(TcpHostile, AFloodOfMessagesIsHeldToItsSlots) {
  open();
  end->record().message_room = 0;
  FrameHeader header;
  header.type = FrameType::kMessage;
  header.count = kMaxMessageBytes;
  const std::vector<std::byte> body(kMaxMessageBytes);
  for (header.value = 0; header.value < kMessageSlots; ++header.value) {
    peer->send(header);
    peer->send(std::span(body));
    run_idle({end->domain.get()});
  }
  EXPECT_TRUE(end->record().down.empty());
  header.value = 7;  // the last message was not taken
  peer->send(header);
  peer->try_send(body);
  wait_down();
  end->record().message_room = SIZE_MAX;
  run_idle({end->domain.get()});  // takes them, on a link that does not exist
  EXPECT_EQ(end->record().messages.size(), kMessageSlots);
}

// A frame of 48 bytes takes as long as 1 KiB of pages, so bytes alone must not limit a turn.
TEST_F(TcpHostile, AFloodOfSmallFramesHasItsTurnLikeEverythingElse) {
  constexpr uint64_t kFrames = 4000;
  open();
  std::vector<FrameHeader> flood(kFrames, write_header(1, 0));
  for (uint64_t i = 0; i < kFrames; ++i) flood[i].sequence = i + 1;
  peer->send(std::as_bytes(std::span(flood)));
  uint64_t most = 0;
  const auto limit = std::chrono::steady_clock::now() + test::kLimit;
  for (uint64_t counted = 0; counted < kFrames;) {
    ASSERT_LT(std::chrono::steady_clock::now(), limit);
    end->domain->poll();
    most = std::max(most, end->record().counted - counted);
    counted = end->record().counted;
  }
  EXPECT_LE(most, 256U + 170U) << "more than the turn's 256 KiB at 1 KiB each, and what is left of one read";
}

TEST_F(TcpHostile, AMessageGoesAheadOfWritesThatHaveNotBegun) {
  open();
  ASSERT_EQ(post(*end, kLinkOfA, *end, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  ASSERT_EQ(end->domain->send(kLinkOfA, 2, Bytes(9, std::byte{7})), Posted::kYes);
  wait_readable();
  const auto first = peer->receive<FrameHeader>();
  EXPECT_EQ(first.type, FrameType::kMessage);
  EXPECT_EQ(first.count, 9U);
  peer->receive<std::array<std::byte, 9>>();
  EXPECT_EQ(peer->receive<FrameHeader>().type, FrameType::kWrite);
}

TEST_F(TcpHostile, AnotherPeersWordsAreMadePrintable) {
  open();
  ASSERT_EQ(post(*end, kLinkOfA, *end, {.work = 5, .from = {0}, .to = {0}}), Posted::kYes);
  FrameHeader refusal;
  refusal.type = FrameType::kRefusal;
  refusal.sequence = 1;
  refusal.value = 77;  // no code that a refusal may carry
  const std::string text = "a\nb\x1b[31m";
  refusal.count = static_cast<uint16_t>(text.size());
  peer->send(refusal);
  peer->send(std::as_bytes(std::span(text)));
  wait_down();
  EXPECT_EQ(end->record().completed.at(5)->code, ErrorCode::kRefused);
  EXPECT_NE(end->record().completed.at(5)->message.find("a?b?[31m"), std::string::npos);
}

TEST_F(TcpHostile, ARefusalLeavesOnlyItsOwnBatchWithThatReason) {
  open();
  for (WorkId work = 1; work <= 3; ++work) {
    ASSERT_EQ(post(*end, kLinkOfA, *end, {.work = work, .from = {0}, .to = {0}}), Posted::kYes);
  }
  wait_readable();
  FrameHeader refusal;
  refusal.type = FrameType::kRefusal;
  refusal.acknowledged = 1;
  refusal.sequence = 2;
  refusal.value = static_cast<uint32_t>(ErrorCode::kOutOfRange);
  peer->send(refusal);
  peer->close();
  wait_down();
  EXPECT_TRUE(end->record().succeeded(1)) << "acknowledged before the link broke";
  EXPECT_EQ(end->record().completed.at(2)->code, ErrorCode::kOutOfRange);
  EXPECT_EQ(end->record().completed.at(3)->code, ErrorCode::kPeerDown);
}

// The peer writes with keys that were never valid, and reads none of the refusals.
TEST_F(TcpHostile, UnreadRefusalsEndTheLink) {
  open();
  FrameHeader header = write_header(1, 1);
  header.rkey ^= 1;
  while (end->record().down.empty() && header.sequence < 1'000'000) {
    for (int i = 0; i < 64; ++i, ++header.sequence) {
      std::array<std::byte, sizeof(header) + sizeof(uint64_t) + 1> frame{};
      std::memcpy(frame.data(), &header, sizeof(header));
      peer->try_send(frame);
    }
    end->domain->poll();
  }
  ASSERT_EQ(end->record().down.size(), 1U);
  EXPECT_TRUE(end->memory == before);
  EXPECT_EQ(end->record().counted, 0U);
}

TEST_F(TcpHostile, ARefusalIsOfWhatWasPostedAndOnce) {
  struct Case {
    uint64_t acknowledged;
    uint64_t sequence;
  };
  // Batches that were never posted, batches acknowledged before, and the second refusal of a batch.
  for (const std::vector<Case>& refusals :
       {std::vector<Case>{{0, 4}}, {{0, 0}}, {{2, 3}, {2, 2}}, {{0, 2}, {0, 2}}, {{0, 3}, {0, 1}}}) {
    open();
    for (WorkId work = 1; work <= 3; ++work) {
      ASSERT_EQ(post(*end, kLinkOfA, *end, {.work = work, .from = {0}, .to = {0}}), Posted::kYes);
    }
    wait_readable();
    run_idle({end->domain.get()});
    for (const Case& one : refusals) {
      FrameHeader refusal;
      refusal.type = FrameType::kRefusal;
      refusal.acknowledged = one.acknowledged;
      refusal.sequence = one.sequence;
      refusal.value = static_cast<uint32_t>(ErrorCode::kUnknownRegion);
      peer->send(refusal);
    }
    wait_down();
  }
}

TEST_F(TcpHostile, FenceInsideAFrame) {
  open();
  peer->send(write_header());
  peer->send(uint64_t{0});
  const std::vector<std::byte> half(2048, std::byte{0xAB});
  peer->send(std::span<const std::byte>(half));
  run_until({end->domain.get()}, [&] { return end->memory[2047] == std::byte{0xAB}; });
  EXPECT_FALSE(end->domain->deregister_region(end->rkey)) << "a frame is landing";
  peer->send(std::span<const std::byte>(half));  // waits in the socket's buffer
  EXPECT_TRUE(end->domain->fence(kLinkOfA));
  EXPECT_TRUE(end->domain->deregister_region(end->rkey));
  run_idle({end->domain.get()});
  EXPECT_EQ(std::memcmp(end->memory.data() + 2048, before.data() + 2048, before.size() - 2048), 0);
  EXPECT_TRUE(end->record().immediates.empty());
  EXPECT_TRUE(end->record().down.empty());
}

TEST_F(TcpHostile, PeerClosesInsideAFrame) {
  open();
  ASSERT_EQ(post(*end, kLinkOfA, *end, {.work = 5, .from = {0}, .to = {0}}), Posted::kYes);
  peer->send(write_header());
  peer->send(uint64_t{0});
  peer->send(std::span<const std::byte>(std::vector<std::byte>(100)));
  run_idle({end->domain.get()});
  peer->close();
  wait_down();
  EXPECT_EQ(end->record().completed.at(5)->code, ErrorCode::kPeerDown);
  EXPECT_TRUE(end->record().immediates.empty());
  EXPECT_TRUE(end->domain->deregister_region(end->rkey)) << "nothing is landing any more";
}

TEST_F(TcpHostile, DeregisterWaitsForTheFrameThatIsLanding) {
  open();
  peer->send(write_header());
  peer->send(uint64_t{0});
  const std::vector<std::byte> half(2048, std::byte{0xAB});
  peer->send(std::span<const std::byte>(half));
  run_until({end->domain.get()}, [&] { return end->memory[2047] == std::byte{0xAB}; }, "landing");
  EXPECT_FALSE(end->domain->deregister_region(end->rkey));
  peer->send(std::span<const std::byte>(half));
  run_until({end->domain.get()}, [&] { return end->domain->deregister_region(end->rkey); }, "landed");
  EXPECT_EQ(end->record().counted, 1U);
  FrameHeader next = write_header();
  next.sequence = 2;
  wait_readable();
  EXPECT_EQ(peer->receive<FrameHeader>().acknowledged, 1U);
  peer->send(next);
  peer->send(uint64_t{0});
  peer->send(std::span<const std::byte>(half));
  peer->send(std::span<const std::byte>(half));
  wait_readable();
  const auto refusal = peer->receive<FrameHeader>();
  EXPECT_EQ(refusal.type, FrameType::kRefusal);
  EXPECT_EQ(refusal.sequence, 2U);
  EXPECT_EQ(refusal.value, static_cast<uint32_t>(ErrorCode::kUnknownRegion));
  EXPECT_EQ(end->record().counted, 1U);
  EXPECT_TRUE(end->record().down.empty());
}

TEST_F(TcpHostile, RandomBytesNeverDoHarm) {
  std::mt19937 random(11);
  for (int round = 0; round < 50; ++round) {
    open();
    // Mostly a valid header with one byte changed, so that every branch of the parser is reached.
    FrameHeader header = write_header(static_cast<uint16_t>(1 + random() % 64), 1 + random() % 500);
    auto* const raw = reinterpret_cast<unsigned char*>(&header);
    raw[random() % sizeof(header)] ^= static_cast<unsigned char>(1U << (random() % 8));
    peer->send(header);
    std::vector<std::byte> noise(random() % 40'000);
    for (std::byte& value : noise) value = static_cast<std::byte>(random());
    peer->try_send(noise);
    peer->close();
    wait_down();
  }
}

// --- Strangers.

TEST(TcpStrangers, ProveThemselvesOrAreClosed) {
  Pair pair;
  const Bytes bytes = pair.a.domain->offer(kLinkOfA).value();
  const Offer offer = Offer::decode(bytes).value();
  const auto refused = [&](const Hello& hello) {
    RawSocket raw = RawSocket::dial(offer.port);
    raw.send(hello);
    run_until({pair.a.domain.get()}, [&] { return raw.closed(); }, "stranger closed");
  };
  for (size_t i = 0; i < offer.dialer.bytes.size(); ++i) {
    Hello hello = hello_for(offer);
    hello.secret.bytes[i] ^= std::byte{1};
    refused(hello);
  }
  Hello hello = hello_for(offer);
  hello.secret = offer.listener;
  refused(hello);
  hello = hello_for(offer);
  hello.link = 4711;
  refused(hello);
  hello = hello_for(offer);
  hello.magic ^= 1;
  refused(hello);
  hello = hello_for(offer);
  hello.version += 1;
  refused(hello);
  refused(hello_for(offer, offer.connections));
  // None of them did any harm.
  EXPECT_TRUE(pair.a.record().down.empty());
  const Bytes answer = pair.b.domain->accept(kLinkOfB, bytes).value();
  ASSERT_TRUE(pair.a.domain->complete(kLinkOfA, answer).ok());
  ASSERT_EQ(post(pair.b, kLinkOfB, pair.a, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  pair.run_until([&] { return pair.b.record().succeeded(1); });
  // The secret has opened the agreed connections. It opens no more, and none after a fence.
  refused(hello_for(offer, 0));
  refused(hello_for(offer, 1));
  EXPECT_TRUE(pair.b.record().down.empty());
  pair.a.domain->fence(kLinkOfA);
  refused(hello_for(offer, 0));
}

TEST(TcpStrangers, ConnectionsBeyondTheAgreedNumberAreVoid) {
  Pair pair;
  const Offer offer = Offer::decode(pair.a.domain->offer(kLinkOfA).value()).value();
  RawSocket surplus = RawSocket::dial(offer.port);
  surplus.send(hello_for(offer, 1));
  run_idle({pair.a.domain.get()});
  ASSERT_TRUE(pair.a.domain->complete(kLinkOfA, Answer{kLinkOfA, 1}.encode()).ok());
  (void)surplus.receive<Welcome>();
  run_until({pair.a.domain.get()}, [&] { return surplus.closed(); });
  EXPECT_TRUE(pair.a.record().down.empty());
}

TEST(TcpStrangers, MayTakeTheirHelloInPieces) {
  End a;
  const Offer offer = Offer::decode(a.domain->offer(kLinkOfA).value()).value();
  RawSocket raw = RawSocket::dial(offer.port);
  const Hello hello = hello_for(offer);
  for (const std::byte& byte : std::as_bytes(std::span(&hello, 1))) {
    raw.send(byte);
    run_idle({a.domain.get()});
  }
  EXPECT_TRUE(raw.receive<Welcome>().secret.equals(offer.listener));
}

TEST(TcpStrangers, ASilentStrangerIsClosedInTime) {
  Tuning tuning;
  tuning.hello_timeout = std::chrono::milliseconds(30);
  End a(tuning);
  const Offer offer = Offer::decode(a.domain->offer(kLinkOfA).value()).value();
  RawSocket silent = RawSocket::dial(offer.port);
  RawSocket halfway = RawSocket::dial(offer.port);
  halfway.send(std::as_bytes(std::span("KVH")));
  run_until({a.domain.get()}, [&] { return silent.closed() && halfway.closed(); });
  run_idle({a.domain.get()});
  EXPECT_TRUE(a.domain->prepare_sleep());
}

TEST(TcpStrangers, ACrowdPushesOutItsOldest) {
  Tuning tuning;
  tuning.max_strangers = 3;
  Pair pair(tuning);
  const Bytes bytes = pair.a.domain->offer(kLinkOfA).value();
  const Offer offer = Offer::decode(bytes).value();
  std::vector<RawSocket> crowd;
  for (int i = 0; i < 5; ++i) {
    crowd.push_back(RawSocket::dial(offer.port));
    run_idle({pair.a.domain.get()});
  }
  EXPECT_TRUE(crowd[0].closed() && crowd[1].closed());
  EXPECT_FALSE(crowd[2].closed() || crowd[3].closed() || crowd[4].closed());
  // A peer is still admitted.
  ASSERT_TRUE(pair.a.domain->complete(kLinkOfA, pair.b.domain->accept(kLinkOfB, bytes).value()).ok());
  ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  pair.run_until([&] { return pair.a.record().succeeded(1); });
}

TEST(TcpStrangers, AHelloInACrowdIsRead) {
  Tuning tuning;
  tuning.max_strangers = 24;
  End a(tuning);
  const Offer offer = Offer::decode(a.domain->offer(kLinkOfA).value()).value();
  const auto dial = [&](int count) {
    std::vector<RawSocket> dialled;
    for (; count > 0; --count) dialled.push_back(RawSocket::dial(offer.port));
    return dialled;
  };
  RawSocket peer = RawSocket::dial(offer.port);
  std::vector<RawSocket> strangers = dial(20);
  run_idle({a.domain.get()});
  // All at once: one more stranger than there is room for, some that send a byte, and last the oldest stranger's Hello.
  const std::vector<RawSocket> crowd = dial(16);
  for (RawSocket& stranger : strangers) stranger.send(std::byte{});
  peer.send(hello_for(offer));
  run_idle({a.domain.get()});
  EXPECT_TRUE(peer.receive<Welcome>().secret.equals(offer.listener));
}

TEST(TcpStrangers, AFloodCostsNoTransfer) {
  constexpr size_t kFlood = 2000;
  rlimit descriptors{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &descriptors), 0);
  const rlimit before = descriptors;
  descriptors.rlim_cur = descriptors.rlim_max;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &descriptors), 0);
  if (descriptors.rlim_max < kFlood + 500) GTEST_SKIP() << "needs a limit of at least 2,500 open files (ulimit -n)";
  Pair pair;
  pair.connect();
  const Offer open = Offer::decode(pair.a.domain->offer(99).value()).value();
  pair.run_until([&] {
    run_idle(pair.both());
    return true;
  });
  const sockaddr_in name = loopback(open.port);
  std::vector<RawSocket> flood;
  for (size_t i = 0; i < kFlood; ++i) {
    UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int rc = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name));
    ASSERT_TRUE(rc == 0 || errno == EINPROGRESS);
    flood.emplace_back(std::move(socket));
  }
  // The connectors get no turn. The domains do not notice the flood, and a link that is up needs no connector.
  size_t done = 0;
  const auto limit = std::chrono::steady_clock::now() + test::kLimit;
  for (WorkId work = 1; work <= 100; ++work) {
    ASSERT_EQ(post(pair.a, kLinkOfA, pair.b, {.work = work, .from = {0}, .to = {0}}), Posted::kYes);
    ASSERT_EQ(post(pair.b, kLinkOfB, pair.a, {.work = work, .from = {0}, .to = {0}}), Posted::kYes);
    while (done < 2 * work) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit);
      for (Driven* side : pair.both()) {
        side->domain().poll();
        side->domain().completions().drain([&](Completion& one) {
          EXPECT_EQ(one.error(), nullptr);
          done += one.kind == Completion::Kind::kWork ? 1 : 0;
        });
      }
    }
  }
  // When served, they stay few: each new connection closes the oldest one.
  const auto open_ones = [&] {
    return static_cast<size_t>(std::count_if(flood.begin(), flood.end(), [](RawSocket& one) { return !one.gone(); }));
  };
  EXPECT_GT(open_ones(), Tuning{}.max_strangers);
  pair.run_until([&] { return open_ones() == Tuning{}.max_strangers; }, "all but the newest are dismissed");
  EXPECT_TRUE(pair.a.record().down.empty() && pair.b.record().down.empty());
  flood.clear();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(TcpStrangers, WithoutDescriptorsTheListenerRests) {
  End a;
  const Offer offer = Offer::decode(a.domain->offer(kLinkOfA).value()).value();
  RawSocket raw = RawSocket::dial(offer.port);
  raw.send(hello_for(offer));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  a.domain->connector().serve();
  pollfd fd{a.domain->connector().fd(), POLLIN, 0};
  // poll(2) itself fails beyond the limit, so it is called after the limit is lifted.
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(::poll(&fd, 1, 0), 0) << "the control thread would spin on a connection that it cannot accept";
  run_until({a.domain.get()}, [&] {
    pollfd welcome{raw.fd(), POLLIN, 0};
    return ::poll(&welcome, 1, 0) == 1;
  });
  EXPECT_TRUE(raw.receive<Welcome>().secret.equals(offer.listener));
}

TEST(TcpStrangers, AnImpostorAtThePeersAddressGetsNoData) {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name = loopback(0);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  ASSERT_EQ(::listen(listener.get(), 4), 0);
  socklen_t length = sizeof(name);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&name), &length), 0);

  End b({}, 1);
  Offer offer;
  offer.address = "127.0.0.1";
  offer.port = ntohs(name.sin_port);
  offer.link = 1;
  offer.connections = 1;
  ASSERT_TRUE(b.domain->accept(kLinkOfB, offer.encode()).ok());
  ASSERT_EQ(post(b, kLinkOfB, b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  run_idle({b.domain.get()});
  RawSocket impostor(UniqueFd(::accept(listener.get(), nullptr, nullptr)));
  run_idle({b.domain.get()});
  (void)impostor.receive<Hello>();
  Welcome welcome;
  welcome.secret.bytes[0] = std::byte{1};
  impostor.send(welcome);
  run_until({b.domain.get()}, [&] { return !b.record().down.empty(); });
  EXPECT_TRUE(b.domain->fence(kLinkOfB));
  EXPECT_EQ(b.record().failure(1), ErrorCode::kPeerDown);
  EXPECT_TRUE(impostor.closed()) << "not one byte of the batch came";
}

TEST(TcpControlPlane, MalformedOffersAndAnswersAreErrors) {
  End a;
  End b;
  const Bytes offer = a.domain->offer(kLinkOfA).value();
  for (size_t length = 0; length < offer.size(); ++length) {
    EXPECT_FALSE(b.domain->accept(kLinkOfB, std::span(offer).first(length)).ok()) << length;
  }
  // An answer consumes its offer, so each answer has a new offer.
  const auto refused = [&](std::span<const std::byte> words) {
    EXPECT_TRUE(a.domain->offer(77).ok());
    EXPECT_EQ(a.domain->complete(77, words).error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(a.domain->complete(77, Answer{77, 2}.encode()).error().code, ErrorCode::kUnknownPeer);
  };
  const Bytes answer = Answer{77, 2}.encode();
  for (size_t length = 0; length < answer.size(); ++length) refused(std::span(answer).first(length));
  refused(Answer{78, 2}.encode());
  refused(Answer{77, 3}.encode());  // more connections than offered
  Bytes longer = offer;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(b.domain->accept(kLinkOfB, longer).ok());
  Offer bad = Offer::decode(offer).value();
  bad.address = "no address";
  EXPECT_EQ(b.domain->accept(kLinkOfB, bad.encode()).error().code, ErrorCode::kInvalidArgument);
  bad.address = std::string(1000, '1');
  EXPECT_FALSE(b.domain->accept(kLinkOfB, bad.encode()).ok());
  Bytes newer = offer;
  newer[4] ^= std::byte{2};
  const Status version = Offer::decode(newer).ok() ? Status{} : Status{Offer::decode(newer).error()};
  ASSERT_FALSE(version.ok());
  EXPECT_EQ(Status(version).error().code, ErrorCode::kRefused) << "a version of its own";
  // Another offered link still works.
  ASSERT_TRUE(a.domain->complete(kLinkOfA, b.domain->accept(kLinkOfB, offer).value()).ok());
  ASSERT_EQ(post(a, kLinkOfA, b, {.work = 1, .from = {0}, .to = {0}}), Posted::kYes);
  run_until({a.domain.get(), b.domain.get()}, [&] { return a.record().succeeded(1); });
}

}  // namespace
}  // namespace kvc::tcp
