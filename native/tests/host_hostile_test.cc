// The host provider against bytes and words that no correct peer writes, against strangers, and against floods.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <set>

#include "host_test_support.h"

namespace kvc::host {
namespace {

TEST(Host, OffersOfOtherMachinesAndDeadProcessesLeadNowhere) {
  Pair pair;
  const Bytes good = pair.a.domain->offer(kLinkOfA).value();
  Bytes elsewhere = good;
  elsewhere[offsetof(Invitation, boot_id)] ^= std::byte{1};
  EXPECT_EQ(pair.b.domain->accept(1, elsewhere).error().code, ErrorCode::kNotReachable);
  Bytes nobody = good;
  nobody[offsetof(Invitation, socket) + 12] = std::byte{'x'};
  EXPECT_EQ(pair.b.domain->accept(1, nobody).error().code, ErrorCode::kNotReachable);
  Bytes other = good;
  other[offsetof(Invitation, version)] ^= std::byte{2};
  EXPECT_EQ(pair.b.domain->accept(1, other).error().code, ErrorCode::kRefused);
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_EQ(pair.b.domain->accept(1, std::span(good).first(length)).error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_FALSE(pair.a.domain->offer(kLinkOfA).ok()) << "one link twice";
  const auto failure = [&](LinkId link, const Bytes& answer) {
    const Status completed = pair.a.domain->complete(link, answer);
    return completed.ok() ? std::nullopt : std::optional(completed.error().code);
  };
  EXPECT_EQ(failure(5, to_bytes(Answer{})), ErrorCode::kInvalidArgument);
  const Bytes answer = pair.b.domain->accept(kLinkOfB, good).value();
  EXPECT_EQ(failure(kLinkOfA, {}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(failure(kLinkOfA, answer), ErrorCode::kInvalidArgument) << "it is used up";
  const Bytes another = pair.a.domain->offer(kLinkOfA + 1).value();
  Bytes old = pair.b.domain->accept(kLinkOfB + 1, another).value();
  old[offsetof(Answer, version)] ^= std::byte{2};
  EXPECT_EQ(failure(kLinkOfA + 1, old), ErrorCode::kRefused);
}

TEST(Host, AWrongSecretCostsOnlyItsSender) {
  Pair pair;
  const Bytes offer = pair.a.domain->offer(kLinkOfA).value();
  Bytes wrong = offer;
  wrong[offsetof(Invitation, secret) + 15] ^= std::byte{1};
  ASSERT_TRUE(pair.b.domain->accept(kLinkOfB, wrong).ok());
  post(pair.b, kLinkOfB, pair.a.rkey, {.work = 1});
  run_until(pair.both(), [&] { return !pair.b.record().down.empty(); }, "the refusal");
  EXPECT_EQ(pair.b.record().failure(1), ErrorCode::kPeerDown);
  const Bytes answer = pair.b.domain->accept(kLinkOfB + 1, offer).value();
  // A secret is valid once: a third party that has read the offer is too late.
  ASSERT_TRUE(pair.b.domain->accept(kLinkOfB + 2, offer).ok());
  run_until(pair.both(), [&] { return pair.b.record().down.size() == 2; }, "the second refusal");
  EXPECT_EQ(pair.b.record().down[1].link, kLinkOfB + 2);
  ASSERT_TRUE(pair.a.domain->complete(kLinkOfA, answer).ok());
  ASSERT_TRUE(pair.b.domain->accept(kLinkOfB + 3, offer).ok());
  run_until(pair.both(), [&] { return pair.b.record().down.size() == 3; }, "the third refusal");
  post(pair.b, kLinkOfB + 1, pair.a.rkey, {.work = 2});
  run_until(pair.both(), [&] { return pair.a.record().counted == 1; }, "the good link");
}

// A peer in another PID namespace has no pidfd here. If it is killed inside its gate, it leaves messages that nothing
// reads.
TEST(Host, APeerWithoutAPidfdIsFoundGoneBehindUnreadMessages) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  UniqueFd theirs(ends[1]);
  const same_host::Connection connection(host::kLane, {UniqueFd(ends[0]), 0}, {},
                                         same_host::Connection::Role::kOfferer);
  constexpr int kUnread = 40;
  const same_host::Message wake{.kind = same_host::MessageKind::kWake};
  for (int i = 0; i < kUnread; ++i) ASSERT_EQ(send(theirs.get(), &wake, sizeof(wake), 0), ssize_t{sizeof(wake)});
  EXPECT_FALSE(connection.peer_is_gone()) << "it lives";
  theirs = UniqueFd();
  bool gone = false;
  for (int look = 0; look < kUnread && !gone; ++look) gone = connection.peer_is_gone();
  EXPECT_TRUE(gone);
}

TEST(Host, WithoutDescriptorsTheListenerRests) {
  Pair pair;
  const Bytes answer = pair.b.domain->accept(kLinkOfB, pair.a.domain->offer(kLinkOfA).value()).value();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  pair.a.domain->connector().serve();
  // poll(2) itself fails beyond the limit, so it is called after the limit is lifted.
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  pollfd fd{pair.a.domain->connector().fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&fd, 1, 0), 0) << "the control thread would spin on a connection that it cannot accept";
  ASSERT_TRUE(pair.a.domain->complete(kLinkOfA, answer).ok());
  post(pair.b, kLinkOfB, pair.a.rkey, {.work = 1});
  run_until(pair.both(), [&] { return pair.a.record().counted == 1; }, "the write");
}

TEST(Host, AnAnswerWithoutAConnectionCompletesNothing) {
  Pair pair;
  Bytes wrong = pair.a.domain->offer(kLinkOfA).value();
  wrong[offsetof(Invitation, secret) + 15] ^= std::byte{1};
  const Bytes answer = pair.b.domain->accept(kLinkOfB, wrong).value();
  const Status completed = pair.a.domain->complete(kLinkOfA, answer);
  ASSERT_FALSE(completed.ok());
  EXPECT_EQ(completed.error().code, ErrorCode::kPeerDown);
}

TEST(Host, EveryBitOfAnOfferMayBeWrong) {
  End acceptor;
  for (size_t byte = 0; byte < sizeof(Offer); ++byte) {
    End offerer;
    Bytes offer = offerer.domain->offer(kLinkOfA).value();
    offer[byte] ^= std::byte{0x81};
    const auto link = static_cast<LinkId>(byte + 1);
    if (acceptor.domain->accept(link, offer).ok()) {
      run_idle({offerer.domain.get(), acceptor.domain.get()});
      EXPECT_TRUE(acceptor.domain->fence(link));
    }
    EXPECT_TRUE(offerer.domain->fence(kLinkOfA));
  }
}

class HostScribbles : public testing::TestWithParam<int> {};

TEST_P(HostScribbles, OverwrittenControlWordsCostTheLinkOnly) {
  Pair pair(Backing::kMemfd);
  pair.connect();
  Segment& segment = only_segment();
  for (Channel* channel : {&segment.to_acceptor, &segment.to_offerer}) {
    switch (GetParam()) {
      case 0:
        channel->tail.store(1ULL << 63);
        break;
      case 1:
        channel->head.store(77);
        break;
      case 2:
        channel->starved.store(1);
        break;
      case 3:
        channel->admission.store(~0ULL);
        break;
      case 4:
        channel->messages_put.store(~0ULL);
        break;
      case 5:
        channel->messages_taken.store(~0ULL);
        break;
      default:
        std::memset(static_cast<void*>(channel), 0xA5, sizeof(*channel));
    }
  }
  for (WorkId work = 0; work < kRingEntries + 10; ++work) {
    post(pair.a, kLinkOfA, pair.b.rkey, {.work = work, .page_bytes = 8});
    if (work % 64 == 0) run_idle(pair.both());
  }
  run_idle(pair.both());
  EXPECT_FALSE(pair.a.record().completed.empty());
  const bool harmless = GetParam() == 1 || GetParam() == 2 || GetParam() == 5;  // their owner writes them again
  EXPECT_EQ(pair.a.record().down.empty() && pair.b.record().down.empty(), harmless);
  if (harmless) {
    EXPECT_EQ(pair.b.record().counted, kRingEntries + 10);
  }
}

INSTANTIATE_TEST_SUITE_P(Words, HostScribbles, testing::Range(0, 7));

TEST(Host, AHeadBeyondTheTailIsNoRoom) {
  Pair pair;
  pair.connect();
  for (WorkId work = 0; work < kRingEntries; ++work)
    post(pair.a, kLinkOfA, pair.b.rkey, {.work = work, .page_bytes = 8});
  only_segment().to_acceptor.head.store(kRingEntries + 1);
  post(pair.a, kLinkOfA, pair.b.rkey, {.work = kRingEntries, .page_bytes = 8});
  EXPECT_EQ(pair.a.record().failure(kRingEntries), ErrorCode::kPeerDown);
  EXPECT_EQ(pair.a.record().down.size(), 1U);
}

// A peer made of plain system calls, which accepts A's offer in any way.
struct RawPeer {
  explicit RawPeer(End& end) {
    const Bytes bytes = end.domain->offer(kLinkOfA).value();
    std::memcpy(&offer, bytes.data(), sizeof(offer));
    socket = std::move(connect_to(offer.socket.data()).value());
    segment = std::move(create_sealed_memory("kvc-link", sizeof(Segment), Others::kWrite).value());
    board = std::move(create_sealed_memory("kvc-board", sizeof(Board), Others::kRead).value());
  }
  void hello() const {
    const std::array fds{segment.fd.get(), board.fd.get()};
    ASSERT_EQ(send_message(socket.get(), {MessageKind::kHello, 0, 0, offer.secret}, fds), Sent::kYes);
  }
  // Sends hello and an answer, and lets the domain write.
  void join(End& end) const {
    reinterpret_cast<Segment*>(segment.mapping.data())->to_acceptor.admit(Admission::kOpen);
    hello();
    ASSERT_TRUE(end.domain->complete(kLinkOfA, to_bytes(Answer{})).ok());
  }
  // The next message from the domain. kNone: there is none.
  Message next() const {
    Message message;
    std::array<UniqueFd, kMaxDescriptors> fds;
    return receive_message(socket.get(), message, fds) == Received::kMessage ? message : Message{};
  }
  // Waits until the domain closes the connection.
  void expect_hangup(End& end) const {
    run_until(
        {end.domain.get()},
        [this] {
          Message message;
          std::array<UniqueFd, kMaxDescriptors> fds;
          return receive_message(socket.get(), message, fds) == Received::kClosed;
        },
        "the hang-up");
  }
  Offer offer;
  UniqueFd socket;
  SealedMemory segment;
  SealedMemory board;
};

TEST(Host, StrangersWithoutTheRightWordsAreDropped) {
  End end;
  const std::vector<std::function<void(const RawPeer&)>> openings = {
      [](const RawPeer& raw) { EXPECT_EQ(send(raw.socket.get(), "hi", 2, 0), 2); },
      [](const RawPeer& raw) { EXPECT_EQ(send_message(raw.socket.get(), {MessageKind::kWake}, {}), Sent::kYes); },
      [](const RawPeer& raw) {  // no descriptors
        EXPECT_EQ(send_message(raw.socket.get(), {MessageKind::kHello, 0, 0, raw.offer.secret}, {}), Sent::kYes);
      },
      [](const RawPeer& raw) {  // memory that is too small
        const SealedMemory small = std::move(create_sealed_memory("kvc-link", 4096, Others::kWrite).value());
        const std::array fds{small.fd.get(), raw.board.fd.get()};
        EXPECT_EQ(send_message(raw.socket.get(), {MessageKind::kHello, 0, 0, raw.offer.secret}, fds), Sent::kYes);
      },
      [](const RawPeer& raw) {  // memory that may shrink during use
        const UniqueFd open(memfd_create("kvc-link", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        EXPECT_EQ(ftruncate(open.get(), sizeof(Segment)), 0);
        const std::array fds{open.get(), raw.board.fd.get()};
        EXPECT_EQ(send_message(raw.socket.get(), {MessageKind::kHello, 0, 0, raw.offer.secret}, fds), Sent::kYes);
      },
  };
  for (const auto& opening : openings) {
    const RawPeer raw(end);
    run_idle({end.domain.get()});  // it was admitted and sends nothing
    opening(raw);
    raw.expect_hangup(end);
    EXPECT_TRUE(end.domain->fence(kLinkOfA));
    run_idle({end.domain.get()});
  }
  EXPECT_TRUE(end.record().down.empty()) << "none of them ever had a link";
}

TEST(Host, AHelloThatComesAfterTheConnectionIsReadByComplete) {
  End end;
  const RawPeer raw(end);
  run_idle({end.domain.get()});  // faster than the peer: a connection without any data
  raw.hello();
  EXPECT_TRUE(end.domain->complete(kLinkOfA, to_bytes(Answer{})).ok());
}

TEST(Host, SilentStrangersDoNotKeepPeersOut) {
  Pair pair;
  std::vector<std::unique_ptr<RawPeer>> silent;
  for (int i = 0; i < 200; ++i) {
    silent.push_back(std::make_unique<RawPeer>(pair.a));
    run_idle(pair.both());
    pair.a.domain->fence(kLinkOfA);
    run_idle(pair.both());
  }
  // A stranger that is slow is not admitted either.
  const RawPeer slow(pair.a);
  run_idle(pair.both());
  slow.join(pair.a);
  EXPECT_TRUE(pair.a.domain->fence(kLinkOfA));
  pair.connect();
  post(pair.b, kLinkOfB, pair.a.rkey, {.work = 1});
  run_until(pair.both(), [&] { return pair.a.record().counted == 1; }, "a write");
}

TEST(Host, AHelloInACrowdIsRead) {
  End end;
  const RawPeer raw(end);
  run_idle({end.domain.get()});  // it was admitted and sends nothing
  std::vector<UniqueFd> crowd;
  for (int i = 0; i < 100; ++i) crowd.push_back(std::move(connect_to(raw.offer.socket.data()).value()));
  raw.hello();
  EXPECT_TRUE(end.domain->complete(kLinkOfA, to_bytes(Answer{})).ok());
}

TEST(Host, AFloodOfDialsIsTheControlThreadsAlone) {
  End end;
  ASSERT_TRUE(end.domain->prepare_sleep());
  std::vector<std::unique_ptr<RawPeer>> silent;
  for (int i = 0; i < 100; ++i) {
    silent.push_back(std::make_unique<RawPeer>(end));
    end.domain->connector().withdraw(kLinkOfA);
  }
  pollfd entries[] = {{end.domain->domain().fd(), POLLIN, 0}, {end.domain->connector().fd(), POLLIN, 0}};
  EXPECT_EQ(::poll(entries, 2, 0), 1);
  EXPECT_EQ(entries[0].revents, 0);
  for (int turn = 0; turn < 40; ++turn) EXPECT_FALSE(end.domain->domain().poll());
  end.domain->connector().serve();
  EXPECT_EQ(::poll(entries + 1, 1, 0), 1) << "not all at once: others wait for the control thread";
  run_idle({end.domain.get()});
  EXPECT_EQ(::poll(entries, 2, 0), 0);
}

TEST(Host, ALyingPeerCostsItsLinkOnly) {
  End end;
  const std::vector<std::function<void(const RawPeer&)>> lies = {
      [](const RawPeer& raw) { EXPECT_EQ(send(raw.socket.get(), "hi", 2, 0), 2); },
      [](const RawPeer& raw) { EXPECT_EQ(send_message(raw.socket.get(), {MessageKind::kWelcome}, {}), Sent::kYes); },
      [](const RawPeer& raw) {
        EXPECT_EQ(send_message(raw.socket.get(), {MessageKind::kMemory, 1, 1}, {}), Sent::kYes);
      },
      [](const RawPeer& raw) {
        EXPECT_EQ(send_message(raw.socket.get(), {static_cast<MessageKind>(99)}, {}), Sent::kYes);
      },
  };
  for (const auto& lie : lies) {
    const RawPeer raw(end);
    raw.join(end);
    const size_t before = end.record().down.size();
    run_idle({end.domain.get()});
    lie(raw);
    run_until({end.domain.get()}, [&] { return end.record().down.size() > before; }, "the end of the link");
    EXPECT_TRUE(end.domain->fence(kLinkOfA));
    run_idle({end.domain.get()});
  }
}

TEST(Host, ALyingBoardIsCheckedBeforeAnythingIsWritten) {
  End end;
  const RawPeer raw(end);
  raw.join(end);
  const SealedMemory memory = std::move(create_sealed_memory("host-test", 8192, Others::kWrite).value());
  const std::array fds{memory.fd.get()};
  ASSERT_EQ(send_message(raw.socket.get(), {MessageKind::kMemory, 1, 8192}, fds), Sent::kYes);
  run_idle({end.domain.get()});
  RegionEntry& entry = reinterpret_cast<Board*>(raw.board.mapping.data())->regions[5];
  const uint64_t rkey = 7 * kMaxRegions + 5;
  entry.rkey.store(rkey);
  entry.memory.store(1);
  const auto outcome = [&](WorkId work, uint64_t length, uint64_t offset, uint64_t to) {
    entry.length.store(length);
    entry.memory_offset.store(offset);
    post(end, kLinkOfA, rkey, {.work = work, .pages = {{0, to}}});
    return end.record().failure(work);
  };
  EXPECT_EQ(outcome(1, 1ULL << 40, 0, 1ULL << 39), ErrorCode::kOutOfRange);
  EXPECT_EQ(outcome(2, 8192, 1, 0), ErrorCode::kOutOfRange);
  EXPECT_EQ(outcome(3, 8192, UINT64_MAX - 100, 0), ErrorCode::kOutOfRange);
  EXPECT_EQ(outcome(4, UINT64_MAX, UINT64_MAX, 4096), ErrorCode::kOutOfRange);
  EXPECT_EQ(outcome(5, 4096, 4096, 0), std::nullopt);
  EXPECT_TRUE(end.record().succeeded(5));
  // A region in memory that never arrives: the batch waits and the thread sleeps. The batch fails when the region is
  // withdrawn.
  entry.memory.store(2);
  EXPECT_EQ(outcome(6, 4096, 0, 0), std::nullopt);
  EXPECT_TRUE(end.domain->prepare_sleep());
  entry.rkey.store(0);
  ASSERT_EQ(send_message(raw.socket.get(), {MessageKind::kForget, 2}, {}), Sent::kYes);
  while (!end.domain->domain().poll()) {
  }
  EXPECT_FALSE(end.domain->prepare_sleep()) << "the batch can be looked at again";
  run_until({end.domain.get()}, [&] { return end.record().completed.contains(6); }, "its end");
  EXPECT_EQ(end.record().failure(6), ErrorCode::kUnknownRegion);
  // Or when the link ends.
  entry.rkey.store(rkey);
  EXPECT_EQ(outcome(7, 4096, 0, 0), std::nullopt);
  EXPECT_TRUE(end.domain->prepare_sleep());
  EXPECT_TRUE(end.domain->fence(kLinkOfA));
  EXPECT_EQ(end.record().failure(7), ErrorCode::kPeerDown);
}

TEST(Host, APeerThatDoesNotReadItsSocketReceivesAllMemoryLater) {
  constexpr size_t kMemfds = 400;  // more than a socket takes
  End end;
  const RawPeer raw(end);
  raw.join(end);
  std::vector<uint64_t> keys;
  for (size_t i = 0; i < kMemfds; ++i) {
    const SharedMemory shared = std::move(SharedMemory::create("host-test", 4096).value());
    keys.push_back(end.domain->register_region(shared.data(), 4096, shared.fd(), 0).value());
  }
  run_idle({end.domain.get()});
  EXPECT_TRUE(end.domain->prepare_sleep()) << "awake over a full socket";
  for (size_t i = 0; i < kMemfds; i += 2) EXPECT_TRUE(end.domain->deregister_region(keys[i]));
  std::set<uint32_t> known;
  size_t heard = 0;
  for (bool more = true; more;) {
    run_idle({end.domain.get()});
    more = false;
    for (Message message = raw.next(); message.kind != MessageKind::kNone; message = raw.next()) {
      more = true;
      ++heard;
      if (message.kind == MessageKind::kMemory) known.insert(message.memory);
      if (message.kind == MessageKind::kForget) known.erase(message.memory);
    }
  }
  EXPECT_EQ(known.size(), kMemfds / 2);
  EXPECT_LT(heard, kMemfds + kMemfds / 2) << "the socket took them all: this test has tested nothing";
}

}  // namespace
}  // namespace kvc::host
