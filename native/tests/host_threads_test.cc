// The host provider on several threads, for the thread sanitizer.
#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "engine/control_thread.h"
#include "host_test_support.h"

namespace kvc::host {
namespace {

TEST(HostThreads, TwoDomainsOfOneProcess) {
  for (const Backing backing : {Backing::kPrivate, Backing::kMemfd}) {
    constexpr uint32_t kRounds = 200;
    Pair pair(backing);
    pair.connect();
    std::thread receiver([&] {
      for (uint32_t round = 1; round <= kRounds; ++round) {
        run_until({pair.b.domain.get()}, [&] { return pair.b.record().counted == 2 * round; }, "a round");
        EXPECT_EQ(pair.b.memory[4096], static_cast<std::byte>(round));
        std::memset(pair.b.memory, 0, pair.b.bytes);
        post(pair.b, kLinkOfB, pair.a.rkey, {.work = round, .page_bytes = 0});
      }
      run_until({pair.b.domain.get()}, [&] { return pair.b.domain->deregister_region(pair.b.rkey); }, "the end");
    });
    for (uint32_t round = 1; round <= kRounds; ++round) {
      std::memset(pair.a.memory, static_cast<int>(round), pair.a.bytes);
      post(pair.a, kLinkOfA, pair.b.rkey, {.work = round, .pages = {{0, 4096}, {8192, 4096}}});
      run_until({pair.a.domain.get()}, [&] { return pair.a.record().counted == round; }, "the answer");
    }
    receiver.join();
    EXPECT_EQ(pair.a.record().completed.size(), kRounds);
  }
}

// The control thread registers memory, makes links and ends both, while the other thread posts and polls.
TEST(HostThreads, TheTwoHalvesOfADomainAreTwoThreads) {
  SharedMemory source = std::move(SharedMemory::create("host-test", 1 << 16).value());
  SharedMemory target = std::move(SharedMemory::create("host-test", 1 << 16).value());
  ControlThread control([] {});
  test::must(control.start("test"));
  OpenedDomain a = std::move(create(DomainConfig{}, control).value());
  OpenedDomain b = std::move(create(DomainConfig{}, control).value());
  size_t done = 0;
  size_t counted = 0;
  size_t messages = 0;
  const auto poll = [&] {
    a.domain->poll();
    b.domain->poll();
    a.domain->completions().drain([&](Completion& completion) {
      EXPECT_EQ(completion.kind, Completion::Kind::kWork);
      EXPECT_EQ(completion.error(), nullptr);
      ++done;
    });
    b.domain->completions().drain([&](Completion& completion) {
      if (completion.kind == Completion::Kind::kImmediate) ++counted;
      if (completion.kind != Completion::Kind::kMessage) return;
      ++messages;
      b.domain->take(completion.link, completion.slot());
    });
  };
  const auto on_control = [&](const std::function<void()>& work) {
    std::atomic<bool> ready = false;
    control.run([&] {
      work();
      ready.store(true, std::memory_order_release);
    });
    while (!ready.load(std::memory_order_acquire)) {
      if (a.domain && b.domain) poll();
    }
  };
  for (LinkId link = 1; link <= 30; ++link) {
    std::unique_ptr<Registration> region;
    std::unique_ptr<LinkEnd> end_a;
    Connector::Accepted accepted;
    on_control([&] {
      const int memfd = link % 2 == 0 ? target.fd() : -1;
      region = std::move(b.connector->register_memory({target.data(), target.size(), memfd, 0}).value());
      accepted = std::move(b.connector->accept(link, a.connector->offer(link).value()).value());
      end_a = std::move(a.connector->complete(link, accepted.answer).value());
    });
    b.domain->publish(*region);
    b.domain->attach(link, std::move(accepted.end));
    a.domain->attach(link, std::move(end_a));
    const PageWrite page{source.data(), 0};
    WriteBatch batch{.work = link, .rkey = region->key, .page_bytes = 1 << 16, .counted = true, .pages = {&page, 1}};
    ASSERT_EQ(a.domain->post(link, batch), Posted::kYes);
    ASSERT_EQ(a.domain->send(link, link, Bytes(64)), Posted::kYes);
    while (done < 2 * link || counted < link || messages < link) poll();
    while (!a.domain->fence(link) || !b.domain->fence(link) || !b.domain->withdraw(*region)) poll();
    on_control([&] { region.reset(); });
  }
  a.domain.reset();
  b.domain.reset();
  on_control([&] {
    a.connector.reset();
    b.connector.reset();
  });
}

}  // namespace
}  // namespace kvc::host
