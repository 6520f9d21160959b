// The libfabric provider's links against a peer with arbitrary behaviour, and with a control thread beside the polling
// thread.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/control_thread.h"
#include "providers/libfabric/endpoint.h"
#include "providers/libfabric/messages.h"
#include "providers/libfabric/wire.h"
#include "tests/libfabric_test_support.h"

namespace kvc::libfabric {
namespace {

// --- A peer driven by the test

class LibfabricPeer : public Libfabric {
 protected:
  // Accepts a's offer as process `pid`, and completes the handshake.
  void accept(uint32_t pid = static_cast<uint32_t>(::getpid())) {
    device_ = must(Device::open(config_of(GetParam()), {}));
    const Card offer = must(Card::decode("accept", must(a->domain->offer(kA))));
    endpoint_ = must(Endpoint::open(device_, offer.secret));
    must(endpoint_->meet(offer, false));
    Card card = must(endpoint_->card());
    card.pid = pid;
    must(a->domain->complete(kA, card.encode()));
    messages_ = std::make_unique<Messages>(*endpoint_);
    heard_ = {};
  }
  void say(MessageKind kind, Bytes body) {
    messages_->enqueue(kind, std::move(body));
    step();
  }
  void step() {
    std::array<fi_cq_data_entry, 8> entries;
    const ssize_t got = endpoint_->read(entries);
    for (ssize_t i = 0; i < got; ++i) {
      auto* const operation = static_cast<Operation*>(entries[static_cast<size_t>(i)].op_context);
      auto* const buffer = static_cast<MessageBuffer*>(operation);
      if (operation->kind == Operation::Kind::kSend) messages_->sent(*buffer);
      if (operation->kind != Operation::Kind::kReceive) continue;
      heard_ = must(messages_->read(*buffer, entries[static_cast<size_t>(i)].len))->kind;
      (void)endpoint_->receive(*buffer);
    }
    ASSERT_TRUE(messages_->push().ok());
  }
  void run(const std::function<bool()>& done, const char* what) {
    Libfabric::run({a.get()}, [&] { return step(), done(); }, what);
  }
  static Bytes in_slot(uint32_t slot) {
    Bytes body = encode_number(slot);
    body.resize(body.size() + 10);
    return body;
  }
  void expect_nonsense() {
    run([&] { return !a->record().down.empty(); }, "the link to break");
    EXPECT_NE(a->record().down[0].error.message.find("a malformed message"), std::string::npos);
  }

  std::shared_ptr<const Device> device_;
  std::unique_ptr<Endpoint> endpoint_;
  std::unique_ptr<Messages> messages_;
  MessageKind heard_{};  // the last message that it received
};

INSTANTIATE_TEST_SUITE_P(Devices, LibfabricPeer, testing::ValuesIn(kDevices),
                         [](const auto& info) { return test::label(info.param); });

TEST_P(LibfabricPeer, ASlotIsUsedAgainOnceItsMessageWasTaken) {
  accept();
  say(MessageKind::kUser, in_slot(3));
  run([&] { return a->record().messages.size() == 1; }, "a message");  // and it is taken
  say(MessageKind::kUser, in_slot(3));
  run([&] { return a->record().messages.size() == 2; }, "another in its slot");
  a->record().message_room = 2;
  say(MessageKind::kUser, in_slot(3));
  say(MessageKind::kUser, in_slot(3));
  expect_nonsense();
  EXPECT_EQ(a->record().messages.size(), 2U);
}

TEST_P(LibfabricPeer, NonsenseCostsItsLink) {
  const std::vector<std::pair<MessageKind, Bytes>> all = {{MessageKind::kUser, in_slot(kMessageSlots)},
                                                          {MessageKind::kUser, encode_number(uint32_t{0})},
                                                          {MessageKind::kTaken, encode_number(uint32_t{0})},
                                                          {MessageKind::kTaken, encode_number(uint64_t{0})},
                                                          {MessageKind::kSeen, encode_number(uint64_t{1})},
                                                          {MessageKind::kAsk, Bytes(5)},
                                                          {MessageKind::kTell, Bytes(5)},
                                                          {MessageKind::kRevoke, Bytes(5)},
                                                          {MessageKind::kRevoked, Bytes(5)},
                                                          {MessageKind{99}, {}}};
  for (const auto& [kind, body] : all) {
    SCOPED_TRACE(static_cast<int>(kind));
    accept();
    say(kind, body);
    expect_nonsense();
    // "sockets" has a thread that sends later, and drops the rest when the endpoint is closed.
    if (GetParam() != "sockets") run([&] { return heard_ == MessageKind::kBye; }, "the peer to be told");
    run([&] { return a->domain->fence(kA); }, "the fence");
    a->record().down.clear();
  }
}

TEST_P(LibfabricPeer, AProcessThatIsGoneIsNoticedAtOnce) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  accept(static_cast<uint32_t>(child));
  say(MessageKind::kUser, in_slot(0));
  run([&] { return a->record().messages.size() == 1; }, "a message");
  ASSERT_TRUE(a->record().down.empty());
  ::kill(child, SIGKILL);
  run([&] { return !a->record().down.empty(); }, "its death");
  EXPECT_NE(a->record().down[0].error.message.find("process is gone"), std::string::npos);
  ::waitpid(child, nullptr, 0);
}

// --- Two threads

class LibfabricThreads : public Libfabric {};

INSTANTIATE_TEST_SUITE_P(Devices, LibfabricThreads, testing::ValuesIn(kDevices),
                         [](const auto& info) { return test::label(info.param); });

// Memory and links with their endpoints are created and ended while other links carry writes.
TEST_P(LibfabricThreads, TheControlThreadWorksWhileTheOtherPolls) {
  ControlThread control([] {});
  must(control.start("test"));
  std::vector<std::byte> memory(kBytes);
  std::vector<std::byte> more(kBytes);
  OpenedDomain one;
  OpenedDomain two;
  std::unique_ptr<Registration> source;
  std::unique_ptr<Registration> target;
  // As in the transfer engine: blocking calls run there, and their results are handed over.
  const auto join = [&](LinkId link) {
    std::unique_ptr<LinkEnd> first;
    std::unique_ptr<LinkEnd> second;
    must(control.call([&]() -> Status {
      Connector::Accepted accepted = must(two.connector->accept(link, must(one.connector->offer(link))));
      second = std::move(accepted.end);
      first = must(one.connector->complete(link, accepted.answer));
      return {};
    }));
    one.domain->attach(link, std::move(first));
    two.domain->attach(link, std::move(second));
  };
  must(control.call([&]() -> Status {
    one = must(libfabric::open(config_of(GetParam()), control));
    two = must(libfabric::open(config_of(GetParam()), control));
    source = must(one.connector->register_memory({memory.data(), kBytes / 2}));
    target = must(two.connector->register_memory({memory.data() + kBytes / 2, kBytes / 2}));
    return {};
  }));
  one.domain->publish(*source);
  two.domain->publish(*target);
  join(1);

  constexpr int kRounds = 100;
  std::atomic<int> rounds = 0;
  std::function<void()> round = [&] {
    for (Connector* connector : {one.connector.get(), two.connector.get()}) {
      const auto registration = must(connector->register_memory({more.data(), more.size()}));
      (void)must(connector->offer(77));
      connector->withdraw(77);
    }
    if (++rounds < kRounds) control.run(round);
  };
  control.run(round);

  WorkId posted = 0;
  WorkId completed = 0;
  LinkId other = 2;
  const auto poll = [&] {
    one.domain->poll();
    two.domain->poll();
    one.domain->completions().drain([&](const Completion& completion) {
      if (completion.kind != Completion::Kind::kWork) return;
      EXPECT_EQ(completion.error(), nullptr) << completion.error()->to_string();
      ++completed;
    });
    two.domain->completions().drain([](const Completion&) {});
  };
  const auto limit = Clock::now() + test::kLimit;
  while (rounds < kRounds || completed < posted) {
    if (Clock::now() > limit) {
      ADD_FAILURE() << completed << " of " << posted << " batches and " << rounds << " rounds";
      rounds = kRounds;  // the last round
      break;
    }
    if (rounds < kRounds && posted < completed + 8) {
      std::array<PageWrite, 8> pages;
      for (size_t i = 0; i < pages.size(); ++i) pages[i] = {source->base + i * 8192, i * 8192};
      one.domain->post(1, {.work = ++posted,
                           .source = source.get(),
                           .rkey = target->key,
                           .page_bytes = 4096,
                           .counted = true,
                           .immediate = test::immediate_of(pages.size()),
                           .pages = pages});
    }
    poll();
    const bool first = one.domain->fence(other);
    const bool second = two.domain->fence(other);
    if (first && second && rounds < kRounds) join(++other);
  }
  one.domain.reset();
  two.domain.reset();
  must(control.call([&]() -> Status {
    source.reset();
    target.reset();
    one.connector.reset();
    two.connector.reset();
    return {};
  }));
}

}  // namespace
}  // namespace kvc::libfabric
