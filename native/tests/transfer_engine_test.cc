// Behaviour that does not depend on the lane: configuration, lanes and fallback, waiting, the descriptor, sleeping.

#include "engine/transfer_engine.h"

#include <poll.h>

#include <atomic>
#include <thread>

#include "providers/factory.h"
#include "tests/rig.h"

namespace kvc::test {
namespace {

ErrorCode create_fails(EngineConfig config) {
  const Result<std::unique_ptr<TransferEngine>> engine = TransferEngine::create(std::move(config));
  EXPECT_FALSE(engine.ok());
  return engine.ok() ? ErrorCode::kSystem : engine.error().code;
}

DomainConfig domain(const std::string& provider, const std::string& fabric = "default") {
  DomainConfig config;
  config.provider = provider;
  config.fabric = fabric;
  return config;
}

EngineConfig lanes(const std::string& name, std::vector<DomainConfig> domains, bool allow_fallback = false) {
  EngineConfig config;
  config.name = name;
  config.domains = std::move(domains);
  config.allow_fallback = allow_fallback;
  return config;
}

TEST(TransferEngine, AConfigurationThatCannotWorkIsRefusedWithAReason) {
  EXPECT_EQ(create_fails(lanes("", {domain("sim")})), ErrorCode::kInvalidArgument);
  EXPECT_EQ(create_fails(lanes("engine", {})), ErrorCode::kInvalidArgument);
  EXPECT_EQ(create_fails(lanes("engine", std::vector<DomainConfig>(17, domain("sim")))), ErrorCode::kInvalidArgument);
  const Result<std::unique_ptr<TransferEngine>> unknown =
      TransferEngine::create(lanes("engine", {domain("carrier-pigeon")}));
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().code, ErrorCode::kInvalidArgument);
  for (const std::string_view known : provider_names()) {
    EXPECT_NE(unknown.error().message.find(known), std::string::npos) << unknown.error().message;
  }
  EngineConfig pinned = lanes("engine", {domain("sim")});
  pinned.worker_cpu = 100000;
  EXPECT_EQ(create_fails(pinned), ErrorCode::kInvalidArgument);
}

TEST(TransferEngine, AnUnusableProviderIsLeftOutOnlyWhereFallbackIsAllowed) {
  EXPECT_EQ(create_fails(lanes("engine", {domain("carrier-pigeon"), domain("sim")})), ErrorCode::kInvalidArgument);
  const auto engine = must(TransferEngine::create(lanes("engine", {domain("carrier-pigeon"), domain("sim")}, true)));
  ASSERT_EQ(engine->unusable().size(), 1U);
  EXPECT_EQ(engine->unusable()[0].provider, "carrier-pigeon");
  EXPECT_EQ(engine->domains().size(), 1U);
  EXPECT_EQ(create_fails(lanes("engine", {domain("carrier-pigeon")}, true)), ErrorCode::kInvalidArgument);
}

TEST(TransferEngine, ALaneThatDoesNotLeadToThePeerIsPassedOver) {
  Side first(lanes("first", {domain("sim", "here"), domain("tcp")}), 4096);
  Side second(lanes("second", {domain("sim", "there"), domain("tcp")}), 4096);
  const Handshake offer = must(first.engine->offer("second"));
  const Handshake answer = must(second.engine->accept("first", offer.bytes));
  must(first.engine->complete(offer.peer, answer.bytes));
  EXPECT_EQ(must(first.engine->lane(offer.peer)), "tcp");
  EXPECT_EQ(must(second.engine->lane(answer.peer)), "tcp");
  ASSERT_EQ(answer.passed_over.size(), 1U);
  EXPECT_EQ(answer.passed_over[0].rfind("sim: NOT_REACHABLE", 0), 0U) << answer.passed_over[0];
}

TEST(TransferEngine, TheOfferersPreferenceDecidesAmongCommonLanes) {
  Side first(lanes("first", {domain("tcp"), domain("sim")}), 4096);
  Side second(lanes("second", {domain("sim"), domain("tcp")}), 4096);
  EXPECT_EQ(must(first.engine->lane(connect(*first.engine, *second.engine).first_to_second)), "tcp");
  EXPECT_EQ(must(second.engine->lane(connect(*second.engine, *first.engine).first_to_second)), "sim");
}

TEST(TransferEngine, WithoutACommonLaneThePeerIsRefusedAndBothLanesAreNamed) {
  Side first(lanes("first", {domain("sim")}), 4096);
  Side second(lanes("second", {domain("tcp")}), 4096);
  const Handshake offer = must(first.engine->offer("second"));
  const Result<Handshake> answer = second.engine->accept("first", offer.bytes);
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, ErrorCode::kNotReachable);
  EXPECT_NE(answer.error().message.find("sim"), std::string::npos);
  EXPECT_NE(answer.error().message.find("tcp"), std::string::npos);
  EXPECT_EQ(second.engine->stats().peers, 0U);
}

// The acceptor tries one lane, drops it and takes the next. The offerer sees the end of the first lane's link before
// the answer arrives.
TEST(TransferEngine, AnOfferSurvivesTheEndOfALaneThatTheAnswerDoesNotUse) {
  Side first(lanes("first", {domain("sim"), domain("tcp")}), 4096);
  Side second(lanes("second", {domain("sim"), domain("tcp")}, true), 4096);
  Side third(lanes("third", {domain("sim")}), 4096);
  const Handshake offer = must(first.engine->offer("second"));
  const Handshake given_up = must(second.engine->accept("first", offer.bytes));
  ASSERT_EQ(must(second.engine->lane(given_up.peer)), "sim");
  must(second.engine->fence(given_up.peer, kLimit));
  // A round trip through the first transfer engine's sim domain, which has seen the end of that link now.
  const PeerId other = connect(*first.engine, *third.engine).first_to_second;
  const RemoteRegionId region =
      must(first.engine->import_region(other, must(third.engine->region_descriptor(third.region))));
  ended(*first.engine, must(first.engine->write_one(other, first.region, 0, region, 0, 64, std::nullopt)));

  const Handshake answer = must(second.engine->accept("first", offer.bytes));
  ASSERT_EQ(answer.passed_over.size(), 1U);
  EXPECT_EQ(answer.passed_over[0].rfind("sim: REFUSED", 0), 0U) << answer.passed_over[0];
  must(first.engine->complete(offer.peer, answer.bytes));
  EXPECT_EQ(must(first.engine->lane(offer.peer)), "tcp");
  EXPECT_TRUE(first.engine->poll_events(9).empty());

  // If the answer uses a link that has ended meanwhile, the peer is down.
  const Handshake again = must(first.engine->offer("second"));
  const Handshake dead = must(second.engine->accept("first", again.bytes));
  must(second.engine->fence(dead.peer, kLimit));
  ended(*first.engine, must(first.engine->write_one(other, first.region, 0, region, 0, 64, std::nullopt)));
  must(first.engine->complete(again.peer, dead.bytes));
  const Event down = next_event(*first.engine);
  EXPECT_EQ(down.kind, EventKind::kPeerDown);
  EXPECT_EQ(down.id, again.peer);
  must(first.engine->fence(again.peer, kLimit));
}

TEST(TransferEngine, AnOfferIsAnsweredOnce) {
  Side first(config("first", "sim"), 4096);
  Side second(config("second", "sim"), 4096);
  const Handshake offer = must(first.engine->offer("second"));
  const Handshake answer = must(second.engine->accept("first", offer.bytes));
  must(first.engine->complete(offer.peer, answer.bytes));
  EXPECT_EQ(first.engine->complete(offer.peer, answer.bytes).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(second.engine->accept("thief", offer.bytes).error().code, ErrorCode::kRefused);
}

TEST(TransferEngine, AnEngineTakesItsPeersNameFromTheOfferWhereNoneIsGiven) {
  Pair pair("sim", 4096);
  Side third(config("third", "sim"), 4096);
  const Handshake offer = must(third.engine->offer("sender"));
  const Handshake answer = must(pair.sender.engine->accept("", offer.bytes));
  must(third.engine->complete(offer.peer, answer.bytes));
  third.engine.reset();
  while (true) {
    const std::vector<Event> events = pair.sender.engine->poll_events(1);
    if (events.empty()) {
      std::this_thread::yield();
      continue;
    }
    EXPECT_EQ(events[0].kind, EventKind::kPeerDown);
    EXPECT_EQ(events[0].error->peer, "third");
    break;
  }
}

TEST(TransferEngine, WritesToAnotherPeersRegionAreRefused) {
  Pair pair("sim", 4096);
  Side third(config("third", "sim"), 4096);
  const PeerId other = connect(*pair.sender.engine, *third.engine).first_to_second;
  const TransferId transfer = must(pair.sender.engine->open_transfer(other));
  EXPECT_EQ(pair.sender.engine->write(transfer, pair.sender.region, 0, pair.receiver_region, 0, 64, {}).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(pair.sender.engine->write(transfer, 4711, 0, pair.receiver_region, 0, 64, {}).error().code,
            ErrorCode::kUnknownRegion);
  EXPECT_EQ(pair.sender.engine->write(transfer, pair.sender.region, 0, 4711, 0, 64, {}).error().code,
            ErrorCode::kUnknownRegion);
  EXPECT_EQ(pair.sender.engine->write(4711, pair.sender.region, 0, pair.receiver_region, 0, 64, {}).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(pair.sender.engine->open_transfer(4711).error().code, ErrorCode::kUnknownPeer);
}

TEST(TransferEngine, ARefusedSingleWriteLeavesNoTransferBehind) {
  Pair pair("sim", 4096);
  const auto refused = pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 4000, pair.receiver_region,
                                                     0, 4096, std::nullopt);
  EXPECT_EQ(refused.error().code, ErrorCode::kOutOfRange);
  EXPECT_EQ(pair.sender.engine->stats().transfers_open, 0U);
  EXPECT_TRUE(pair.sender.engine->poll_events(9).empty());
}

TEST(TransferEngine, CountersAreCheckedAndBounded) {
  const auto engine = must(TransferEngine::create(config("engine", "sim")));
  EXPECT_EQ(engine->alloc_counters(0).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(engine->alloc_counters(65537).error().code, ErrorCode::kResources);
  const CounterSet set = must(engine->alloc_counters(2));
  EXPECT_EQ(engine->expect(set.id, {1}).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(engine->expect(set.id, {1, UINT64_MAX}).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(engine->stats().counters_allocated, 2U);
  must(engine->expect(set.id, {0, 0}));  // reached from the start
  EXPECT_EQ(engine->expect(set.id, {0, 0}).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(must(engine->wait_counters(set.id, kLimit)).kind, EventKind::kCountersReached);
  must(engine->release_counters(set.id));
  EXPECT_EQ(engine->release_counters(set.id).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(engine->counter_values(set.id).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(engine->wait_counters(set.id, kLimit).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(engine->stats().counters_allocated, 0U);
}

TEST(TransferEngine, ReleasingASetTakesItsEventBack) {
  const auto engine = must(TransferEngine::create(config("engine", "sim")));
  const CounterSet set = must(engine->alloc_counters(1));
  must(engine->expect(set.id, {0}));
  must(engine->release_counters(set.id));
  EXPECT_TRUE(engine->poll_events(9).empty());
}

// A batch in flight when the link ends: only the receiver can know its outcome.
TEST(TransferEngine, AFailureWithWritesInFlightIsNotQuiesced) {
  EngineConfig slow = config("sender", "sim");
  slow.domains[0].max_delay_us = 3'600'000'000U;  // an hour: it will not be delivered in this test
  Pair pair(slow, config("receiver", "sim"), 4096);
  for (const bool here : {true, false}) {
    const Connection link = connect(*pair.sender.engine, *pair.receiver.engine);
    const RemoteRegionId region = must(pair.sender.engine->import_region(
        link.first_to_second, must(pair.receiver.engine->region_descriptor(pair.receiver.region))));
    const TransferId transfer =
        must(pair.sender.engine->write_one(link.first_to_second, pair.sender.region, 0, region, 0, 64, std::nullopt));
    const auto posted = [&] { return must(pair.sender.engine->progress(transfer)).pages_posted; };
    while (posted() == 0) std::this_thread::yield();
    if (here) {
      must(pair.sender.engine->fence(link.first_to_second, kLimit));
    } else {
      must(pair.receiver.engine->fence(link.second_to_first, kLimit));
    }
    const Event event = ended(*pair.sender.engine, transfer);
    EXPECT_EQ(event.kind, EventKind::kTransferFailed);
    EXPECT_FALSE(event.quiesced);
    EXPECT_EQ(event.pages, 0U);
  }
}

// A set is released between its last count and its event: no event follows.
TEST(TransferEngine, AReleasedSetIsNotReported) {
  Pair pair("sim", 4096);
  for (int round = 0; round < 200; ++round) {
    const CounterSet set = must(pair.receiver.engine->alloc_counters(1));
    must(pair.receiver.engine->expect(set.id, {1}));
    const TransferId transfer = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                   pair.receiver_region, 0, 64, set.immediates[0]));
    if (round % 2 == 0) ended(*pair.sender.engine, transfer);
    must(pair.receiver.engine->release_counters(set.id));
    if (round % 2 == 1) ended(*pair.sender.engine, transfer);
  }
  EXPECT_TRUE(pair.receiver.engine->poll_events(999).empty());
}

TEST(TransferEngine, AWaitThatRunsOutSaysTimeoutAndLosesNothing) {
  Pair pair("sim", 4096);
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  EXPECT_EQ(pair.sender.engine->wait_transfer(transfer, Timeout(1000)).error().code, ErrorCode::kTimeout);
  must(pair.sender.engine->seal(transfer));
  EXPECT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferDone);
  EXPECT_EQ(pair.sender.engine->wait_transfer(transfer, kLimit).error().code, ErrorCode::kInvalidArgument);
}

TEST(TransferEngine, ATransferWithACallbackIsNotWaitedFor) {
  Pair pair("sim", 4096);
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver, [](const Event&) {}));
  EXPECT_EQ(pair.sender.engine->wait_transfer(transfer, kLimit).error().code, ErrorCode::kInvalidArgument);
}

TEST(TransferEngine, TheDescriptorTellsOfEvents) {
  Pair pair("sim", 4096);
  pollfd entry{pair.sender.engine->event_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&entry, 1, 0), 0);
  const TransferId transfer = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                 pair.receiver_region, 0, 64, std::nullopt));
  ASSERT_EQ(poll(&entry, 1, 30000), 1);
  const std::vector<Event> events = pair.sender.engine->poll_events(9);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].id, transfer);
  EXPECT_EQ(poll(&entry, 1, 0), 0);
}

TEST(TransferEngine, QuiesceWaitsForPostedWritesAndReportsTheirFailure) {
  Pair pair("sim", 1 << 20);
  const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
  must(pair.sender.engine->write(transfer, pair.sender.region, 0, pair.receiver_region, 0, 1 << 20, std::nullopt));
  must(pair.sender.engine->quiesce(transfer, kLimit));
  EXPECT_EQ(must(pair.sender.engine->progress(transfer)).pages_done, 1U);
  // A write to memory that the receiver has withdrawn.
  must(pair.receiver.engine->deregister_memory(pair.receiver.region, kLimit));
  must(pair.sender.engine->write(transfer, pair.sender.region, 0, pair.receiver_region, 0, 64, std::nullopt));
  const Status failed = pair.sender.engine->quiesce(transfer, kLimit);
  ASSERT_FALSE(failed.ok());
  // If the failure ended the transfer before the call, no transfer is left to quiesce.
  EXPECT_TRUE(failed.error().code == ErrorCode::kUnknownRegion || failed.error().code == ErrorCode::kInvalidArgument);
  EXPECT_EQ(ended(*pair.sender.engine, transfer).kind, EventKind::kTransferFailed);
}

TEST(TransferEngine, ARegionMayBeDescribedWhileItIsDeregistered) {
  Pair pair("sim", 4096);
  TransferEngine& engine = *pair.receiver.engine;
  std::vector<std::byte> memory(4096);
  for (int round = 0; round < 100; ++round) {
    const RegionId region = must(engine.register_memory(memory.data(), memory.size()));
    std::jthread describes([&engine, region] {
      while (engine.region_descriptor(region).ok()) {
      }
    });
    must(engine.deregister_memory(region, kLimit));
  }
}

TEST(TransferEngine, AnIdleWorkerSleepsAndASignalWakesIt) {
  Pair pair("sim", 4096);
  const auto sleeps = [&] { return pair.sender.engine->stats().sleeps; };
  const std::shared_ptr<LayerSignal> signal = pair.sender.engine->create_signal();
  PagedWrite pages{64, pair.sender.region, {{0}, 64, 0}, pair.receiver_region, {{0}, 64, 0}, {}};
  for (uint64_t round = 1; round <= 200; ++round) {
    const auto [set, immediate] = pair.counter(1);
    const uint64_t before = sleeps();
    const TransferId transfer = must(pair.sender.engine->open_transfer(pair.to_receiver));
    must(pair.sender.engine->arm(transfer, signal, pages, {{round, 0, 0, immediate}}));
    must(pair.sender.engine->seal(transfer));
    // Stored at every phase of the transfer thread's way into its sleep: none of these may be lost.
    if (round % 4 == 0) {
      while (sleeps() == before) std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(round % 40));
    }
    signal->store(round);
    must(pair.receiver.engine->wait_counters(set, kLimit));
    ended(*pair.sender.engine, transfer);
    must(pair.receiver.engine->release_counters(set));
  }
}

TEST(TransferEngine, ASignalMayOutliveItsEngine) {
  std::shared_ptr<LayerSignal> signal;
  {
    const auto engine = must(TransferEngine::create(config("engine", "sim")));
    signal = engine->create_signal();
  }
  signal->store(1);
  EXPECT_EQ(signal->load(), 1U);
}

// Several threads submit at once while others open, cancel and poll: every transfer ends exactly once.
TEST(TransferEngine, ManyThreadsSubmitAtOnce) {
  constexpr int kThreads = 4;
  constexpr int kTransfers = 150;
  Pair pair("sim", 1 << 16);
  TransferEngine& engine = *pair.sender.engine;
  std::atomic<int> done{0};
  std::atomic<int> cancelled{0};
  std::atomic<int> other{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kTransfers; ++i) {
        const TransferId transfer = must(engine.open_transfer(pair.to_receiver, [&](const Event& event) {
          (event.kind == EventKind::kTransferDone        ? done
           : event.kind == EventKind::kTransferCancelled ? cancelled
                                                         : other)++;
        }));
        PagedWrite write{64,
                         pair.sender.region,
                         {shuffled(100, 1024, 1), 64, 0},
                         pair.receiver_region,
                         {shuffled(100, 1024, 2), 64, 0},
                         {}};
        must(engine.write_pages(transfer, write));
        if ((i + t) % 5 == 0) {
          must(engine.cancel(transfer));
        } else {
          must(engine.seal(transfer));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (done + cancelled + other < kThreads * kTransfers) std::this_thread::yield();
  EXPECT_EQ(other.load(), 0);
  EXPECT_EQ(cancelled.load(), kThreads * kTransfers / 5);
  EXPECT_EQ(engine.stats().transfers_open, 0U);
}

}  // namespace
}  // namespace kvc::test
