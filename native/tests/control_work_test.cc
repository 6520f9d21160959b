// Work that may block (registering memory, making links) runs on the control thread. While it is delayed, all work of
// the transfer thread continues. Runs over each lane.

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <string_view>
#include <thread>
#include <utility>

#include "tests/nics.h"
#include "tests/rig.h"

namespace kvc::test::control_work {
namespace {

constexpr size_t kBytes = 256 << 10;

// Delays one call on a control thread.
class Hold {
 public:
  explicit Hold(Nic& nic) {
    nic.control_work = [this](std::string_view call) {
      if (call != call_ || !armed_.exchange(false)) return;
      entered_.set_value();
      released_.get_future().wait();
    };
  }
  // Delays the next of these calls. No such call may be running.
  void arm(std::string_view call) {
    call_ = call;
    entered_ = {};
    released_ = {};
    holds_ = true;
    armed_ = true;
  }
  void wait_until_held() { ASSERT_EQ(entered_.get_future().wait_for(kLimit), std::future_status::ready); }
  void release() {
    if (std::exchange(holds_, false)) released_.set_value();
  }
  // For tests that end early: threads that wait for the call would wait without limit.
  struct Releases {
    Hold& hold;
    ~Releases() { hold.release(); }
  };

 private:
  std::string_view call_;
  std::promise<void> entered_;
  std::promise<void> released_;
  bool holds_ = false;              // used on the test's thread
  std::atomic<bool> armed_{false};  // publishes the other members
};

class ControlWork : public testing::TestWithParam<std::string> {
 protected:
  std::string provider() const { return GetParam(); }

  // Everything that two connected peers do with each other, in both directions.
  static void expect_alive(Pair& pair) {
    for (uint64_t round = 0; round < 20; ++round) {
      const auto write = [&](Side& from, PeerId to, RemoteRegionId region, Side& target) {
        const CounterSet set = must(target.engine->alloc_counters(1));
        must(target.engine->expect(set.id, {1}));
        const TransferId transfer =
            must(from.engine->write_one(to, from.region, 0, region, 0, kBytes, set.immediates[0]));
        must(target.engine->wait_counters(set.id, kLimit));
        EXPECT_EQ(ended(*from.engine, transfer).kind, EventKind::kTransferDone);
        const TransferId sent = must(from.engine->send(to, Bytes(10)));
        must(target.engine->wait_message(kLimit));
        EXPECT_EQ(ended(*from.engine, sent).kind, EventKind::kTransferDone);
      };
      write(pair.sender, pair.to_receiver, pair.receiver_region, pair.receiver);
      write(pair.receiver, pair.to_sender, pair.sender_region, pair.sender);
      const TransferId cancelled = must(pair.receiver.engine->open_transfer(pair.to_sender));
      must(pair.receiver.engine->cancel(cancelled));
      EXPECT_EQ(ended(*pair.receiver.engine, cancelled).kind, EventKind::kTransferCancelled);
    }
  }
  template <typename T>
  static void expect_held(const std::future<T>& call) {
    EXPECT_EQ(call.wait_for(std::chrono::seconds(0)), std::future_status::timeout) << "it was not held up";
  }
};
INSTANTIATE_TEST_SUITE_P(Lanes, ControlWork, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

TEST_P(ControlWork, ARegistrationHoldsNothingElseUp) {
  Nics nics;
  Hold hold(nics[0]);
  Pair pair(config("sender", provider()), nics.with(config("receiver", provider())), kBytes);
  TransferEngine& receiver = *pair.receiver.engine;
  const SharedMemory more = must(SharedMemory::create("kvc-test", kBytes));
  hold.arm("register_memory");
  auto registered =
      std::async(std::launch::async, [&] { return receiver.register_memory(more.data(), more.size(), more.fd(), 0); });
  const Hold::Releases releases{hold};
  hold.wait_until_held();
  expect_alive(pair);
  EXPECT_EQ(receiver.stats().regions, 1U);
  expect_held(registered);
  hold.release();
  const RegionId region = must(registered.get());
  // The registered region works like any other.
  const RemoteRegionId imported =
      must(pair.sender.engine->import_region(pair.to_receiver, must(receiver.region_descriptor(region))));
  EXPECT_EQ(ended(*pair.sender.engine, must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                          imported, 0, kBytes, std::nullopt)))
                .kind,
            EventKind::kTransferDone);
  must(receiver.deregister_memory(region, kLimit));
}

// Pinning may take minutes. Fences and the settlement of a broken link must not wait for it.
TEST_P(ControlWork, ARegistrationDelaysNeitherAFenceNorTheEndOfALink) {
  Nics sending;
  Nics receiving;
  Hold hold(receiving[0]);
  Pair pair(sending.with(config("sender", provider(), 2)), receiving.with(config("receiver", provider(), 2)), kBytes);
  Side third(config("third", provider()), kBytes);
  TransferEngine& receiver = *pair.receiver.engine;
  const PeerId to_third = connect(receiver, *third.engine).first_to_second;
  pair.make_links();
  const SharedMemory more = must(SharedMemory::create("kvc-test", kBytes));
  hold.arm("register_memory");
  auto registered =
      std::async(std::launch::async, [&] { return receiver.register_memory(more.data(), more.size(), more.fd(), 0); });
  const Hold::Releases releases{hold};
  hold.wait_until_held();
  must(receiver.fence(to_third, kLimit));
  sending[0].die();
  await([&] { return pair.sender.engine->stats().links_lost > 0 && receiver.stats().links_lost > 0; }, "lost links");
  expect_alive(pair);
  expect_held(registered);
  hold.release();
  must(receiver.deregister_memory(must(registered.get()), kLimit));
}

// The same with real registrations, one after the other, of KVC_TEST_REGISTERED_GIB in total. Their memory is 64 MiB
// that is mapped repeatedly: pages are populated and pinned for each address.
TEST_P(ControlWork, FencesAndFailoverGoOnWhileGigabytesRegister) {
  constexpr size_t kPart = 64 << 20;
  // The ends of a link agree within this time on what arrived, or the peer is lost
  // (docs/architecture/transfer-engine.md).
  constexpr Timeout kSettles = std::chrono::seconds(5);
  const char* gib = std::getenv("KVC_TEST_REGISTERED_GIB");
  const size_t bytes = gib == nullptr ? 4 * kPart : std::strtoull(gib, nullptr, 10) << 30;
  ASSERT_GE(bytes, kPart) << "KVC_TEST_REGISTERED_GIB is not a number of GiB";
  const SharedMemory memory = must(SharedMemory::create("kvc-test", kPart));
  void* const reserved = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(reserved, MAP_FAILED);
  auto* const base = static_cast<std::byte*>(reserved);
  for (size_t at = 0; at < bytes; at += kPart) {
    ASSERT_NE(::mmap(base + at, kPart, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.fd(), 0), MAP_FAILED);
  }

  Nics sending;
  Pair pair(sending.with(config("sender", provider(), 2)), config("receiver", provider(), 2), kBytes);
  TransferEngine& receiver = *pair.receiver.engine;
  pair.make_links();
  // A lane between processes of one machine shares the file, so it registers as many bytes as the file has.
  const bool by_file = provider().find("host") != std::string::npos;
  const size_t registered = by_file ? kPart : bytes;
  std::atomic<size_t> rounds{0};
  std::jthread registrations([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      must(receiver.deregister_memory(must(receiver.register_memory(base, registered, by_file ? memory.fd() : -1, 0)),
                                      kLimit));
      ++rounds;
    }
  });
  const auto another_round = [&] {
    const size_t seen = rounds;
    await([&] { return rounds > seen; }, "a registration");
  };
  for (int round = 0; round < 4; ++round) {
    another_round();
    Side third(config("third", provider()), kBytes);
    const PeerId to_third = connect(receiver, *third.engine).first_to_second;
    must(receiver.fence(to_third, kSettles));
  }
  another_round();
  sending[0].die();
  await([&] { return pair.sender.engine->stats().links_lost > 0 && receiver.stats().links_lost > 0; }, "lost links");
  expect_alive(pair);
  another_round();
  registrations.request_stop();
  registrations.join();
  EXPECT_EQ(receiver.stats().regions, 1U);
  ASSERT_EQ(::munmap(reserved, bytes), 0);
}

TEST_P(ControlWork, AConnectionThatIsMadeHoldsNoOtherPeerUp) {
  for (const std::string_view call : {"offer", "accept", "complete"}) {
    Nics nics;
    Hold hold(nics[0]);
    Pair pair(config("sender", provider()), nics.with(config("receiver", provider())), kBytes);
    Side third(config("third", provider()), kBytes);
    hold.arm(call);
    auto connected = std::async(std::launch::async, [&] {
      return call == "accept" ? connect(*third.engine, *pair.receiver.engine)
                              : connect(*pair.receiver.engine, *third.engine);
    });
    const Hold::Releases releases{hold};
    hold.wait_until_held();
    expect_alive(pair);
    expect_held(connected);
    hold.release();
    const Connection connection = connected.get();
    const PeerId peer = call == "accept" ? connection.second_to_first : connection.first_to_second;
    EXPECT_EQ(ended(*pair.receiver.engine, must(pair.receiver.engine->send(peer, Bytes(1)))).kind,
              EventKind::kTransferDone);
  }
}

// The further links of a peer are made while there is something to write to it. The writes use the existing links.
TEST_P(ControlWork, TheSecondLinkOfAPeerHoldsTheFirstNotUp) {
  for (const std::string_view call : {"offer", "accept", "complete"}) {
    Nics nics;
    Hold hold(nics[1]);
    const bool accepts = call == "accept";
    const EngineConfig sender = config("sender", provider(), 2);
    const EngineConfig receiver = config("receiver", provider(), 2);
    Pair pair(accepts ? sender : nics.with(sender), accepts ? nics.with(receiver) : receiver, kBytes);
    // The first link is up, which takes control work as well. Messages are no reason to make other links.
    const TransferId sent = must(pair.sender.engine->send(pair.to_receiver, Bytes(1)));
    EXPECT_EQ(ended(*pair.sender.engine, sent).kind, EventKind::kTransferDone);
    must(pair.receiver.engine->wait_message(kLimit));
    hold.arm(call);
    const Hold::Releases releases{hold};
    const TransferId first = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                pair.receiver_region, 0, 1, std::nullopt));
    EXPECT_EQ(ended(*pair.sender.engine, first).kind, EventKind::kTransferDone);
    hold.wait_until_held();
    expect_alive(pair);
    EXPECT_LT(pair.sender.engine->stats().links, pair.sender.engine->domains().size());
    hold.release();
    pair.make_links();
    expect_alive(pair);
  }
}

}  // namespace
}  // namespace kvc::test::control_work
