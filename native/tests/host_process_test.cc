// The host provider between processes: both ways to write, wake-ups, and peers that die, stop or cannot be accessed.
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>

#include "host_test_support.h"

namespace kvc::host {
namespace {

class HostProcesses : public testing::TestWithParam<Backing> {};

INSTANTIATE_TEST_SUITE_P(Backings, HostProcesses, testing::Values(Backing::kPrivate, Backing::kMemfd),
                         [](const auto& parameter) {
                           return parameter.param == Backing::kPrivate ? "PrivateMemory" : "SharedMemory";
                         });

// 64 pages of 4,099 bytes, the last ones first, and contiguous pages.
TestBatch scattered() {
  TestBatch batch{.page_bytes = 4099, .pages = {}};
  for (uint64_t i = 0; i < 64; ++i) {
    const uint64_t slot = i < 32 ? 63 - i : i - 32;
    batch.pages.emplace_back(i * 4099, 100 + slot * 4099);
  }
  return batch;
}

TEST_P(HostProcesses, PagesArriveInTheOtherProcess) {
  const size_t bytes = 4 << 20;
  Child child([](const Pipe& pipe) {
    End end(GetParam(), bytes);
    end.fill(2);
    End reference(Backing::kPrivate, bytes);
    reference.fill(1);
    std::vector<std::byte> expected = end.contents();
    for (const auto& [from, to] : scattered().pages) std::memcpy(expected.data() + to, reference.memory + from, 4099);
    std::memcpy(expected.data() + (1 << 20), reference.memory + (1 << 20), 3 << 20);
    accept_over(pipe, end);
    run_until({end.domain.get()}, [&] { return end.record().counted == 65; }, "65 pages");
    EXPECT_TRUE(test::same(end.contents(), expected));
  });
  End end(GetParam(), bytes);
  end.fill(1);
  const uint64_t rkey = offer_over(*child.pipe, end);
  post(end, kLinkOfA, rkey, scattered());
  post(end, kLinkOfA, rkey, {.work = 2, .page_bytes = 3 << 20, .pages = {{1 << 20, 1 << 20}}});
  run_until({end.domain.get()}, [&] { return end.record().completed.size() == 2; }, "both batches");
  EXPECT_TRUE(end.record().succeeded(1));
  EXPECT_TRUE(end.record().succeeded(2));
  EXPECT_EQ(child.wait(), 0);
}

TEST_P(HostProcesses, AWriteWakesASleepingProcess) {
  Child child([](const Pipe& pipe) {
    End end(GetParam());
    accept_over(pipe, end);
    run_until({end.domain.get()}, [&] { return end.record().counted == 1; }, "the first write");
    while (end.domain->poll() || !end.domain->prepare_sleep()) {
    }
    pipe.send_number(1);  // asleep now
    pollfd entry{end.domain->domain().fd(), POLLIN, 0};
    EXPECT_EQ(::poll(&entry, 1, 10000), 1);
    run_until({end.domain.get()}, [&] { return end.record().counted == 2; }, "the second write");
  });
  End end(GetParam());
  const uint64_t rkey = offer_over(*child.pipe, end);
  post(end, kLinkOfA, rkey, {.work = 1});
  run_until({end.domain.get()}, [&] { return child.pipe->readable(); }, "the child's sleep");
  post(end, kLinkOfA, rkey, {.work = 2});
  EXPECT_EQ(child.wait(), 0);
}

TEST_P(HostProcesses, AKilledReceiverEndsItsBatches) {
  Child child([](const Pipe& pipe) {
    End end(GetParam(), 16 << 20);
    accept_over(pipe, end);
    run_until({end.domain.get()}, [] { return false; }, "the kill");
  });
  End end(GetParam(), 16 << 20);
  const uint64_t rkey = offer_over(*child.pipe, end);
  WorkId posted = 0;
  const auto keep_posting = [&] {
    while (post(end, kLinkOfA, rkey, {.work = posted, .page_bytes = 16 << 20}) == Posted::kYes) {
      ++posted;
      if (!end.record().down.empty()) break;
    }
  };
  keep_posting();
  run_until({end.domain.get()}, [&] { return end.record().completed.size() >= 2; }, "the first batches");
  child.signal(SIGKILL);
  run_until({end.domain.get()}, [&] { return keep_posting(), !end.record().down.empty(); }, "news of the death");
  EXPECT_EQ(end.record().completed.size(), posted);
  EXPECT_EQ(end.record().failure(posted - 1), ErrorCode::kPeerDown);
  EXPECT_EQ(end.record().down[0].error.code, ErrorCode::kPeerDown);
  run_until({end.domain.get()}, [&] { return end.domain->fence(kLinkOfA); }, "the fence");
  EXPECT_EQ(child.wait(), -SIGKILL);
}

TEST_P(HostProcesses, AKilledSenderCanWriteNoMore) {
  End end(GetParam(), 16 << 20);
  Child child([](const Pipe& pipe) {
    End sender(GetParam(), 16 << 20);
    sender.fill(3);
    const uint64_t rkey = offer_over(pipe, sender);
    for (WorkId work = 0;; ++work) {
      // 4 MiB at a time: the process is killed in the middle of a page.
      while (post(sender, kLinkOfA, rkey, {.work = work, .page_bytes = 4 << 20}) == Posted::kBusy)
        sender.domain->poll();
    }
  });
  accept_over(*child.pipe, end);
  run_until({end.domain.get()}, [&] { return end.record().counted >= 10; }, "the first pages");
  child.signal(SIGKILL);
  run_until({end.domain.get()}, [&] { return !end.record().down.empty(); }, "news of the death");
  EXPECT_EQ(end.record().down[0].error.code, ErrorCode::kPeerDown);
  run_until({end.domain.get()}, [&] { return end.domain->fence(kLinkOfB); }, "the fence");
  // Fenced: from here on no byte changes, and nothing is counted.
  const uint64_t counted = end.record().counted;
  const std::vector<std::byte> before = end.contents();
  EXPECT_EQ(child.wait(), -SIGKILL);
  run_idle({end.domain.get()});
  EXPECT_EQ(end.contents(), before);
  EXPECT_EQ(end.record().counted, counted);
}

TEST_P(HostProcesses, WhatADeadPeerHasCountedStillCounts) {
  End end(GetParam());
  Child child([](const Pipe& pipe) {
    End sender(GetParam());
    const uint64_t rkey = offer_over(pipe, sender);
    pipe.receive();
    for (WorkId work = 0; work < 2000; ++work) {
      while (post(sender, kLinkOfA, rkey, {.work = work, .page_bytes = 8}) == Posted::kBusy) sender.domain->poll();
    }
    run_until({sender.domain.get()}, [&] { return sender.record().completed.size() == 2000; }, "the writes");
    pipe.send_number(1);
    pipe.receive();
  });
  accept_over(*child.pipe, end);
  run_idle({end.domain.get()});  // gives the child this process's memory
  child.pipe->send_number(1);
  ASSERT_EQ(child.pipe->receive_number(), 1U);  // all 2,000 are in place, and this process has not polled yet
  EXPECT_EQ(end.record().counted, 0U);
  child.signal(SIGKILL);
  EXPECT_EQ(child.wait(), -SIGKILL);
  run_until({end.domain.get()}, [&] { return !end.record().down.empty(); }, "news of the death");
  EXPECT_TRUE(end.domain->fence(kLinkOfB));
  EXPECT_EQ(end.record().counted, 2000U);
}

TEST_P(HostProcesses, AProcessThatHasTakenAMessageOrCountedMayLeaveAtOnce) {
  constexpr LinkId kLinks = 200;
  Child child([](const Pipe& pipe) {
    for (LinkId link = 1; link <= kLinks; ++link) {
      End end(GetParam());
      const auto awaited = link % 2 == 0 ? Completion::Kind::kImmediate : Completion::Kind::kMessage;
      bool fenced = false;
      end.domain->on_completion = [&](const Completion& completion) {
        if (completion.kind == awaited) fenced = end.domain->fence(link);
      };
      pipe.send(end.domain->accept(link, pipe.receive()).value());
      pipe.send_number(end.rkey);
      run_until({end.domain.get()}, [&] { return fenced; }, "what ends it");
    }
  });
  End end(GetParam());
  for (LinkId link = 1; link <= kLinks; ++link) {
    child.pipe->send(end.domain->offer(link).value());
    ASSERT_TRUE(end.domain->complete(link, child.pipe->receive()).ok());
    const uint64_t rkey = child.pipe->receive_number();
    if (link % 2 == 0) {
      post(end, link, rkey, {.work = link, .page_bytes = 1 << 20});
    } else {
      EXPECT_EQ(end.domain->send(link, link, Bytes(100)), Posted::kYes);
    }
    run_until({end.domain.get()}, [&] { return end.record().down.size() == link; }, "the child's fence");
    ASSERT_TRUE(end.record().succeeded(link)) << link;
    EXPECT_TRUE(end.domain->fence(link));
  }
  EXPECT_EQ(child.wait(), 0);
}

TEST(HostProcess, AStoppedPeerIsFencedOutsideItsGateOnly) {
  for (const bool inside : {false, true}) {
    End end;
    Child child([inside](const Pipe& pipe) {
      End sender;
      const uint64_t rkey = offer_over(pipe, sender);
      EXPECT_EQ(post(sender, kLinkOfA, rkey, {}), Posted::kYes);
      if (inside) only_segment().to_acceptor.gate.fetch_add(1);
      pipe.send_number(1);
      pipe.receive();
    });
    accept_over(*child.pipe, end);
    run_until({end.domain.get()}, [&] { return end.record().counted == 1 && child.pipe->readable(); }, "the write");
    child.stop();
    EXPECT_EQ(end.domain->deregister_region(end.rkey), !inside);
    EXPECT_EQ(end.domain->fence(kLinkOfB), !inside);
    EXPECT_EQ(end.domain->fence(kLinkOfB), !inside);
    child.signal(SIGKILL);
    EXPECT_EQ(child.wait(), -SIGKILL);
    EXPECT_TRUE(end.domain->deregister_region(end.rkey)) << "nobody is left to write";
    EXPECT_TRUE(end.domain->fence(kLinkOfB));
  }
}

TEST(HostProcess, AnHeirOfThePeersSocketDoesNotHideItsDeath) {
  End end;
  Child child([](const Pipe& pipe) {
    End sender;
    offer_over(pipe, sender);
    std::array<int, 2> life{};
    EXPECT_EQ(::pipe(life.data()), 0);
    const pid_t heir = fork();  // has all descriptors, including the link's
    if (heir == 0) {
      prctl(PR_SET_PDEATHSIG, 0);
      close(life[1]);
      pollfd entry{life[0], POLLIN, 0};
      ::poll(&entry, 1, 10000);  // until the test ends
      _exit(0);
    }
    pipe.send_number(static_cast<uint64_t>(heir));
    pipe.receive();
  });
  accept_over(*child.pipe, end);
  const auto heir = static_cast<pid_t>(child.pipe->receive_number());
  ASSERT_GT(heir, 0);
  child.signal(SIGKILL);
  EXPECT_EQ(child.wait(), -SIGKILL);
  run_until({end.domain.get()}, [&] { return !end.record().down.empty(); }, "news of the death");
  EXPECT_TRUE(end.domain->fence(kLinkOfB));
  kill(heir, SIGKILL);
}

TEST(HostProcess, MemoryThatThePeerHasUnmappedFailsItsBatchOnly) {
  const size_t bytes = 1 << 20;
  Child child([](const Pipe& pipe) {
    End end;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const uint64_t torn = end.domain->register_region(static_cast<std::byte*>(memory), bytes, -1, 0).value();
    munmap(static_cast<std::byte*>(memory) + bytes / 2, bytes / 2);
    accept_over(pipe, end);
    pipe.send_number(torn);
    run_until({end.domain.get()}, [&] { return end.record().counted == 1; }, "the good write");
    EXPECT_EQ(end.record().immediates.size(), 1U);
  });
  End end(Backing::kPrivate, bytes);
  const uint64_t good = offer_over(*child.pipe, end);
  const uint64_t torn = child.pipe->receive_number();
  post(end, kLinkOfA, torn, {.work = 1, .page_bytes = bytes / 4, .pages = {{0, bytes / 4}, {0, bytes / 2}}});
  post(end, kLinkOfA, good, {.work = 2});
  run_until({end.domain.get()}, [&] { return end.record().completed.size() == 2; }, "both batches");
  EXPECT_EQ(end.record().failure(1), ErrorCode::kSystem);
  EXPECT_TRUE(end.record().succeeded(2));
  EXPECT_EQ(child.wait(), 0);
}

// An ordinary user. The kernel lets it write only into processes that allow it; root always may.
void become_ordinary_and(bool off_limits) {
  if (geteuid() == 0) {
    ASSERT_EQ(setgid(65534), 0);
    ASSERT_EQ(setuid(65534), 0);
  }
  // After setuid(), a process cannot be accessed until it allows it.
  ASSERT_EQ(prctl(PR_SET_DUMPABLE, off_limits ? 0 : 1, 0, 0, 0), 0);
}

TEST(HostProcess, AForbiddingKernelIsNamedAndSharedMemoryWorksNevertheless) {
  for (const Backing backing : {Backing::kPrivate, Backing::kMemfd}) {
    Child offerer([backing](const Pipe& pipe) {
      become_ordinary_and(true);
      End end(backing);
      pipe.send(end.domain->offer(kLinkOfA).value());
      const Bytes answer = pipe.receive();
      if (backing == Backing::kPrivate) return;
      EXPECT_TRUE(end.domain->complete(kLinkOfA, answer).ok());
      pipe.send_number(end.rkey);
      run_until({end.domain.get()}, [&] { return end.record().counted == 1; }, "a write");
    });
    Child acceptor([backing](const Pipe& pipe) {
      become_ordinary_and(false);
      End end(backing);
      Result<Bytes> answer = end.domain->accept(kLinkOfB, pipe.receive());
      if (backing == Backing::kPrivate) {
        ASSERT_FALSE(answer.ok());
        EXPECT_EQ(answer.error().code, ErrorCode::kRefused);
        EXPECT_NE(answer.error().message.find("EPERM"), std::string::npos) << answer.error().to_string();
        EXPECT_NE(answer.error().message.find("tcp"), std::string::npos) << "no way out is named";
        pipe.send_number(0);
        return;
      }
      ASSERT_TRUE(answer.ok()) << answer.error().to_string();
      pipe.send(answer.value());
      const uint64_t rkey = pipe.receive_number();
      post(end, kLinkOfB, rkey, {.work = 1});
      run_until({end.domain.get()}, [&] { return end.record().succeeded(1); }, "a write");
    });
    acceptor.pipe->send(offerer.pipe->receive());
    offerer.pipe->send(acceptor.pipe->receive());
    if (backing == Backing::kMemfd) acceptor.pipe->send(offerer.pipe->receive());
    EXPECT_EQ(acceptor.wait(), 0);
    EXPECT_EQ(offerer.wait(), 0);
  }
}

TEST(HostProcess, ARefusalFromTheOffererIsItsOwn) {
  // In this direction, complete() finds that the peer cannot be accessed.
  Child acceptor([](const Pipe& pipe) {
    become_ordinary_and(true);
    End end;
    accept_over(pipe, end);
    pipe.receive();
  });
  Child offerer([](const Pipe& pipe) {
    become_ordinary_and(false);
    End end;
    pipe.send(end.domain->offer(kLinkOfA).value());
    Status completed = end.domain->complete(kLinkOfA, pipe.receive());
    ASSERT_FALSE(completed.ok());
    EXPECT_EQ(completed.error().code, ErrorCode::kRefused);
  });
  acceptor.pipe->send(offerer.pipe->receive());
  offerer.pipe->send(acceptor.pipe->receive());
  EXPECT_EQ(offerer.wait(), 0);
}

// One end in a new PID namespace. Its offer is sent over `pipe`.
void offer_from_an_inner_pid_namespace(const Pipe& pipe, Backing backing) {
  if (unshare(CLONE_NEWPID) != 0) {
    pipe.send(Bytes(1));
    return;
  }
  const Child inner([backing](const Pipe& outer) {
    End end(backing);
    outer.send(end.domain->offer(kLinkOfA).value());
    outer.receive();
  });
  pipe.send(inner.pipe->receive());
  pipe.receive();
}

TEST_P(HostProcesses, TheAcceptorPassesOverAPeerThatCannotNameIt) {
  Child offerer([](const Pipe& pipe) { offer_from_an_inner_pid_namespace(pipe, GetParam()); });
  End end(GetParam());
  const Bytes offer = offerer.pipe->receive();
  if (offer.size() == 1) GTEST_SKIP() << "needs PID namespaces, which this machine refuses";
  const Result<Bytes> answer = end.domain->accept(kLinkOfB, offer);
  EXPECT_EQ(answer.ok(), GetParam() == Backing::kMemfd) << "only who writes private memory needs a pid";
  if (!answer) {
    EXPECT_EQ(answer.error().code, ErrorCode::kNotReachable);
    EXPECT_NE(answer.error().message.find("pid namespace"), std::string::npos) << answer.error().to_string();
  }
}

TEST_P(HostProcesses, APeerInAnInnerUserNamespaceIsPassedOverEitherWay) {
  Child inner([](const Pipe& pipe) {
    pipe.send_number(unshare(CLONE_NEWUSER) == 0 ? 1 : 0);
    End end(GetParam());
    pipe.send(end.domain->offer(kLinkOfA).value());
    const Bytes offer = pipe.receive();
    if (offer.empty()) return;
    const Result<Bytes> answer = end.domain->accept(kLinkOfB, offer);
    EXPECT_EQ(answer.ok(), GetParam() == Backing::kMemfd);
    if (!answer) {
      EXPECT_EQ(answer.error().code, ErrorCode::kNotReachable) << answer.error().to_string();
    }
  });
  if (inner.pipe->receive_number() != 1) GTEST_SKIP() << "needs user namespaces, which this machine refuses";
  End end(GetParam());
  const Result<Bytes> answer = end.domain->accept(kLinkOfB, inner.pipe->receive());
  EXPECT_EQ(answer.ok(), GetParam() == Backing::kMemfd);
  if (!answer) {
    EXPECT_EQ(answer.error().code, ErrorCode::kNotReachable) << answer.error().to_string();
  }
  inner.pipe->send(end.domain->offer(kLinkOfA).value());
  EXPECT_EQ(inner.wait(), 0);
}

TEST(HostProcess, AnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, because only root can become another user";
  Child offerer([](const Pipe& pipe) {
    become_ordinary_and(false);
    End end(Backing::kMemfd);
    pipe.send(end.domain->offer(kLinkOfA).value());
    pipe.receive();
  });
  End end;
  Result<Bytes> answer = end.domain->accept(kLinkOfB, offerer.pipe->receive());
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, ErrorCode::kRefused);
}

TEST(HostProcess, AnOfferOfADeadProcessLeadsNowhere) {
  Bytes offer;
  {
    Child child([](const Pipe& pipe) {
      End end;
      pipe.send(end.domain->offer(kLinkOfA).value());
    });
    offer = child.pipe->receive();
    EXPECT_EQ(child.wait(), 0);
  }
  End end;
  EXPECT_EQ(end.domain->accept(kLinkOfB, offer).error().code, ErrorCode::kNotReachable);
}

}  // namespace
}  // namespace kvc::host
