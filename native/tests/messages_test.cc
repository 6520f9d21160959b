// Small messages between transfer engines, over each provider: reliable, in no order, and held back by receivers that
// do not read.

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <set>
#include <thread>

#include "engine/message.h"
#include "engine/message_pool.h"
#include "tests/rig.h"

namespace kvc::test {
namespace {

Bytes bytes_of(const std::string& text) {
  const auto* const first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}
std::string text_of(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// Message `number`. Its length depends on the number.
Bytes numbered(uint32_t number) {
  Bytes bytes(sizeof(number) + (number * 37) % (kMaxUserMessageBytes - sizeof(number) + 1));
  fill_random(bytes.data(), bytes.size(), number);
  std::memcpy(bytes.data(), &number, sizeof(number));
  return bytes;
}

class Messages : public testing::TestWithParam<std::string> {
 protected:
  std::string provider() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Lanes, Messages, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

TEST_P(Messages, ArriveWholeAndOnceBothWays) {
  Pair pair(provider(), 4096);
  constexpr uint32_t kCount = 200;
  std::vector<TransferId> sends;
  for (uint32_t i = 0; i < kCount; ++i) {
    const Bytes message = numbered(i);
    sends.push_back(must(pair.sender.engine->send(pair.to_receiver, message)));
    must(pair.receiver.engine->send(pair.to_sender, message));
  }
  for (const auto& [engine, from] :
       {std::pair{pair.receiver.engine.get(), pair.to_sender}, std::pair{pair.sender.engine.get(), pair.to_receiver}}) {
    std::set<uint32_t> seen;
    while (seen.size() < kCount) {
      const Message message = must(engine->wait_message(kLimit));
      const uint32_t number = number_of(message.bytes);
      EXPECT_EQ(message.peer, from);
      EXPECT_TRUE(message.bytes == numbered(number));
      EXPECT_TRUE(seen.insert(number).second) << "message " << number << " came twice";
    }
    EXPECT_TRUE(engine->receive(10).empty());
  }
  for (const TransferId id : sends) EXPECT_EQ(ended(*pair.sender.engine, id).kind, EventKind::kTransferDone);
}

TEST_P(Messages, OfEveryLengthAndOfNoneOther) {
  Pair pair(provider(), 4096);
  for (const size_t length : {size_t{1}, size_t{7}, size_t{8}, size_t{9}, kMaxUserMessageBytes}) {
    Bytes message(length);
    fill_random(message.data(), length, length);
    must(pair.sender.engine->send(pair.to_receiver, message));
    EXPECT_TRUE(must(pair.receiver.engine->wait_message(kLimit)).bytes == message) << length << " bytes";
  }
  for (const size_t length : {size_t{0}, kMaxUserMessageBytes + 1}) {
    const auto refused = pair.sender.engine->send(pair.to_receiver, Bytes(length));
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  }
  const auto unknown = pair.sender.engine->send(4711, Bytes(1));
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().code, ErrorCode::kUnknownPeer);
}

// The receiver does not read. It holds a bounded number of messages, the sender learns it, writes continue, and nothing
// is lost.
TEST_P(Messages, UnreadOnesHoldTheirSenderBackAndNothingElse) {
  Pair pair(provider(), 1 << 20);
  uint32_t accepted = 0;
  while (true) {
    const Result<TransferId> sent = pair.sender.engine->send(pair.to_receiver, numbered(accepted));
    if (!sent.ok()) {
      EXPECT_EQ(sent.error().code, ErrorCode::kResources);
      break;
    }
    ASSERT_LT(++accepted, 100'000U) << "the sender is never held back";
  }
  // Writes to the same peer pass the messages.
  fill_random(pair.sender.data(), 1 << 20, 1);
  for (int i = 0; i < 20; ++i) {
    const auto [set, immediate] = pair.counter(1);
    const TransferId write = must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0,
                                                                pair.receiver_region, 0, 1 << 20, immediate));
    must(pair.receiver.engine->wait_counters(set, kLimit));
    EXPECT_EQ(ended(*pair.sender.engine, write).kind, EventKind::kTransferDone);
  }
  // The receiver's transfer engine has taken its share of the pool. The rest waits at the sender and in flight.
  const size_t taken = pair.sender.engine->poll_events(100'000).size();
  EXPECT_GE(taken, MessagePool::kRoomOfOne);
  EXPECT_LT(taken, accepted);

  std::set<uint32_t> seen;
  while (seen.size() < accepted) {
    ASSERT_TRUE(seen.insert(number_of(must(pair.receiver.engine->wait_message(kLimit)).bytes)).second);
  }
  EXPECT_EQ(*seen.rbegin(), accepted - 1);
  size_t events = taken;
  while (events < accepted) events += pair.sender.engine->poll_events(100'000).size();
  must(pair.sender.engine->send(pair.to_receiver, numbered(accepted)));
  EXPECT_EQ(number_of(must(pair.receiver.engine->wait_message(kLimit)).bytes), accepted);
}

// A flooding peer gets its share of the pool, and the other peers get theirs.
TEST_P(Messages, AFloodLeavesRoomForOthers) {
  Side receiver(config("receiver", provider()), 4096);
  Side flooder(config("flooder", provider()), 4096);
  Side other(config("other", provider()), 4096);
  const PeerId from_flooder = connect(*flooder.engine, *receiver.engine).first_to_second;
  const Connection quiet = connect(*other.engine, *receiver.engine);
  for (uint32_t i = 0; i < 2 * MessagePool::kRoom; ++i) must(flooder.engine->send(from_flooder, numbered(i)));
  const TransferId sent = must(other.engine->send(quiet.first_to_second, bytes_of("hello")));
  EXPECT_EQ(ended(*other.engine, sent).kind, EventKind::kTransferDone);
  bool found = false;
  while (!found) {
    const Message message = must(receiver.engine->wait_message(kLimit));
    found = message.peer == quiet.second_to_first && text_of(message.bytes) == "hello";
  }
}

TEST_P(Messages, TheDescriptorIsReadableWhileOneWaits) {
  Pair pair(provider(), 4096);
  pollfd fd{pair.receiver.engine->message_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&fd, 1, 0), 0);
  must(pair.sender.engine->send(pair.to_receiver, bytes_of("one")));
  must(pair.sender.engine->send(pair.to_receiver, bytes_of("two")));
  ASSERT_EQ(::poll(&fd, 1, 30'000), 1);
  std::set<std::string> texts;
  while (texts.size() < 2) {
    for (const Message& message : pair.receiver.engine->receive(1)) texts.insert(text_of(message.bytes));
  }
  EXPECT_TRUE(texts.contains("one") && texts.contains("two"));
  EXPECT_EQ(::poll(&fd, 1, 0), 0);
}

TEST_P(Messages, GoToACallbackWhichMayAnswerAndThrow) {
  Pair pair(provider(), 4096);
  must(pair.sender.engine->send(pair.to_receiver, numbered(0)));  // waits already when the callback is set
  TransferEngine& echo = *pair.receiver.engine;
  must(echo.set_message_callback([&](const Message& message) {
    // In the callback, submitting is allowed, blocking is refused, and exceptions stop nothing.
    if (const auto answered = echo.send(message.peer, message.bytes, [](const Event&) {}); !answered.ok()) std::abort();
    EXPECT_EQ(echo.wait_message(kLimit).error().code, ErrorCode::kInvalidArgument);
    throw std::runtime_error("a bad callback");
  }));
  std::set<uint32_t> seen;
  constexpr uint32_t kCount = 3 * MessagePool::kRoomOfOne;
  for (uint32_t i = 1; i < kCount; ++i) must(pair.sender.engine->send(pair.to_receiver, numbered(i)));
  while (seen.size() < kCount) seen.insert(number_of(must(pair.sender.engine->wait_message(kLimit)).bytes));
  EXPECT_EQ(echo.stats().callback_errors, kCount);
  EXPECT_TRUE(echo.receive(10).empty());
  must(echo.set_message_callback({}));
  must(pair.sender.engine->send(pair.to_receiver, bytes_of("to the pool")));
  EXPECT_EQ(text_of(must(echo.wait_message(kLimit)).bytes), "to the pool");
}

TEST_P(Messages, AnUnansweredWaitTimesOut) {
  Pair pair(provider(), 4096);
  EXPECT_EQ(pair.receiver.engine->wait_message(Timeout(1000)).error().code, ErrorCode::kTimeout);
}

TEST_P(Messages, WhatWasReceivedOutlivesItsSender) {
  Side receiver(config("receiver", provider()), 4096);
  {
    Side sender(config("sender", provider()), 4096);
    const PeerId peer = connect(*sender.engine, *receiver.engine).first_to_second;
    EXPECT_EQ(ended(*sender.engine, must(sender.engine->send(peer, bytes_of("last words")))).kind,
              EventKind::kTransferDone);
  }
  EXPECT_EQ(text_of(must(receiver.engine->wait_message(kLimit)).bytes), "last words");
}

TEST_P(Messages, ToAPeerThatIsGoneFailLoudly) {
  auto receiver = std::make_unique<Side>(config("receiver", provider()), 4096);
  Side sender(config("sender", provider()), 4096);
  const PeerId peer = connect(*sender.engine, *receiver->engine).first_to_second;
  std::vector<TransferId> sends;
  for (uint32_t i = 0; i < 2 * MessagePool::kRoomOfOne; ++i)
    sends.push_back(must(sender.engine->send(peer, numbered(i))));
  receiver.reset();
  size_t failed = 0;
  for (const TransferId id : sends) {
    const Event event = ended(*sender.engine, id);
    if (event.kind == EventKind::kTransferDone) continue;
    EXPECT_EQ(event.kind, EventKind::kTransferFailed);
    EXPECT_EQ(event.error->code, ErrorCode::kPeerDown);
    ++failed;
  }
  EXPECT_GE(failed, MessagePool::kRoomOfOne);
  const Result<TransferId> late = sender.engine->send(peer, bytes_of("anyone?"));
  EXPECT_TRUE(!late.ok() || ended(*sender.engine, late.value()).kind == EventKind::kTransferFailed);
}

TEST_P(Messages, FromManyThreadsToOne) {
  Pair pair(provider(), 4096);
  constexpr uint32_t kThreads = 4;
  constexpr uint32_t kEach = 100;
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t i = 0; i < kEach; ++i) must(pair.sender.engine->send(pair.to_receiver, numbered(t * kEach + i)));
    });
  }
  std::set<uint32_t> seen;
  while (seen.size() < kThreads * kEach) {
    EXPECT_TRUE(seen.insert(number_of(must(pair.receiver.engine->wait_message(kLimit)).bytes)).second);
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(Messages, OverSeveralDomainsToo) {
  Pair pair(provider(), 4096, 2, 3);
  std::set<uint32_t> seen;
  for (uint32_t i = 0; i < 100; ++i) must(pair.sender.engine->send(pair.to_receiver, numbered(i)));
  while (seen.size() < 100) {
    EXPECT_TRUE(seen.insert(number_of(must(pair.receiver.engine->wait_message(kLimit)).bytes)).second);
  }
}

}  // namespace
}  // namespace kvc::test
