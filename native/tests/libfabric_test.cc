// The libfabric provider alone: two domains in one process, driven by one thread. engine_test.cc runs whole transfer
// engines over it. shm, which only reaches other processes, is tested in tests/conformance.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "lane/immediate.h"
#include "providers/libfabric/domain.h"
#include "providers/libfabric/library.h"
#include "providers/libfabric/wire.h"
#include "tests/cuda_test_support.h"
#include "tests/libfabric_test_support.h"

#ifdef KVC_ADDRESS_SANITIZER
// Libfabric's "net" (1.17) leaks 1 KB with each endpoint, in fi_endpoint().
extern "C" [[gnu::visibility("default")]] const char*
__lsan_default_suppressions();  // NOLINT: the sanitizer's own name
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric.so\n"; }  // NOLINT
extern "C" [[gnu::visibility("default")]] const char* __asan_default_options();  // NOLINT: the sanitizer's own name
// Otherwise the leak search at the end of a process follows the recorded requests of __tls_get_addr. With glibc 2.36 it
// may crash there ("Tracer caught signal 11"). It crashed whenever other tests had run before those with a separate
// process. No object here is reachable only through such memory, so the option adds no leak reports.
extern "C" const char* __asan_default_options() { return "intercept_tls_get_addr=0"; }  // NOLINT
#endif

namespace kvc::libfabric {
namespace {

// "sockets" leaves a header in the socket until all of its 24 bytes have arrived. Linux counts a segment in full while
// any byte of it is left (docs/architecture/lanes.md). A receive buffer must hold more than the longest of 17 fragments
// of 32 KiB. The kernel's default starts below that, and one run in 25 of AReceiverThatSleepsIsNotOverrun hung.
[[maybe_unused]] const int kReceiveBuffers = ::setenv("FI_SOCKETS_MAX_BUF_SZ", "4194304", 0);

INSTANTIATE_TEST_SUITE_P(Devices, Libfabric, testing::ValuesIn(kDevices),
                         [](const auto& info) { return test::label(info.param); });

TEST_P(Libfabric, SaysWhatItIs) {
  const std::string description = a->domain->connector().description();
  EXPECT_EQ(description.rfind("libfabric ", 0), 0U) << description;
  EXPECT_NE(description.find(library().value()->path), std::string::npos);
}

TEST_P(Libfabric, PagesLandAndAreCountedOverTheirLink) {
  connect();
  test::fill_random(a->memory.data(), a->memory.size(), 1);
  post(1, 64, b->rkey);
  EXPECT_FALSE(ended(1).has_value());
  run([&] { return b->record().counted == 64; }, "the immediates");
  for (size_t page = 0; page < 64; ++page) {
    EXPECT_EQ(std::memcmp(a->memory.data() + page * 8192, b->memory.data() + page * 8192, 4096), 0) << page;
    EXPECT_EQ(b->memory[page * 8192 + 4096], std::byte{0}) << page;
  }
  for (const LinkId link : b->record().immediate_links) EXPECT_EQ(link, kB);
  EXPECT_TRUE(a->record().immediates.empty());
}

TEST_P(Libfabric, PagesThatFollowEachOtherGoAsOneWrite) {
  connect();
  test::fill_random(a->memory.data(), a->memory.size(), 2);
  test::Batch batch{.page_bytes = 1000};
  for (size_t page = 0; page < 16; ++page) {
    batch.from.push_back(page * 1000);
    batch.to.push_back(5 + page * 1000);
  }
  ASSERT_EQ(test::post(*a, kA, *b, batch), Posted::kYes);
  EXPECT_FALSE(ended(1).has_value());
  run([&] { return b->record().counted == 16; }, "the immediate");
  EXPECT_EQ(b->record().immediates.size(), 1U);
  EXPECT_EQ(std::memcmp(a->memory.data(), b->memory.data() + 5, 16000), 0);
}

// The transfer engine makes no longer page, and a page of this length works.
TEST_P(Libfabric, TheLongestPageIsTheLongestWrite) {
  const uint64_t longest = a->domain->connector().limits().page_bytes;
  EXPECT_GE(longest, DomainLimits{}.batch_bytes);
  EXPECT_LE(longest, DomainLimits{}.page_bytes);
  if (longest > (64 << 20)) return;  // tcp: more than the memory of the machine
  connect();
  std::vector<std::byte> source(longest);
  std::vector<std::byte> target(longest);
  test::fill_random(source.data(), longest, 6);
  must(a->domain->register_region(source.data(), longest));
  const uint64_t rkey = must(b->domain->register_region(target.data(), longest));
  const PageWrite page{source.data(), 0};
  ASSERT_EQ(a->domain->post(kA, {.work = 1, .rkey = rkey, .page_bytes = longest, .pages = {&page, 1}}), Posted::kYes);
  EXPECT_FALSE(ended(1).has_value());
  EXPECT_EQ(source, target);
}

TEST_P(Libfabric, AnImmediateWithoutPagesStandsForAll) {
  connect();
  const std::vector<PageWrite> pages(9);
  const WriteBatch batch{.work = 1, .counted = true, .immediate = Immediate{1, 1, 9}.encode(), .pages = pages};
  ASSERT_EQ(a->domain->post(kA, batch), Posted::kYes);
  EXPECT_FALSE(ended(1).has_value());
  run([&] { return b->record().counted == 9; }, "the immediate");
}

TEST_P(Libfabric, TheAcceptorMayPostAtOnce) {
  const Bytes offer = must(a->domain->offer(kA));
  const Bytes answer = must(b->domain->accept(kB, offer));
  ASSERT_EQ(test::post(*b, kB, *a, {.work = 5, .from = {0}, .to = {0}, .counted = false}), Posted::kYes);
  ASSERT_EQ(b->domain->send(kB, 6, Bytes(3)), Posted::kYes);
  ASSERT_TRUE(a->domain->complete(kA, answer).ok());
  run([&] { return b->record().succeeded(5) && b->record().succeeded(6); }, "the acceptor's write and message");
}

// More immediates than a window holds. The receiver has no turn until the sender has stopped.
TEST_P(Libfabric, AReceiverThatSleepsIsNotOverrun) {
  connect();
  constexpr WorkId kBatches = 100;
  WorkId posted = 0;
  run(
      [&] {
        while (posted < kBatches && posted - a->record().order.size() < 16) post(++posted, 64, b->rkey);
        return a->record().order.size() == kBatches;
      },
      "all batches");
  run([&] { return b->record().counted == kBatches * 64; }, "all immediates");
  for (const auto& [work, error] : a->record().completed) EXPECT_FALSE(error.has_value()) << error->to_string();
}

TEST_P(Libfabric, MessagesArriveOnceAndWaitForRoom) {
  connect();
  b->record().message_room = 0;
  std::vector<Bytes> sent;
  WorkId work = 0;
  for (size_t bytes : {size_t{1}, size_t{100}, kMaxMessageBytes}) {
    sent.push_back(Bytes(bytes, static_cast<std::byte>(bytes % 251)));
    ASSERT_EQ(a->domain->send(kA, ++work, sent.back()), Posted::kYes);
  }
  post(50, 1, b->rkey);  // messages that are not taken do not stop writes
  EXPECT_FALSE(ended(50).has_value());
  EXPECT_TRUE(b->record().messages.empty());
  EXPECT_FALSE(a->record().succeeded(1));
  b->record().message_room = 10;
  run([&] { return a->record().succeeded(1) && a->record().succeeded(2) && a->record().succeeded(3); }, "the messages");
  ASSERT_EQ(b->record().messages.size(), 3U);
  std::sort(b->record().messages.begin(), b->record().messages.end(),
            [](const auto& left, const auto& right) { return left.second.size() < right.second.size(); });
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(b->record().messages[i].first, kB);
    EXPECT_EQ(b->record().messages[i].second, sent[i]);
  }
}

// As many untaken messages as the contract promises, in both directions at once. A region that was not written before
// is then written and withdrawn (Ask, Tell, Revoke, Revoked) as if the messages were not there.
TEST_P(Libfabric, UntakenMessagesHoldUpNothing) {
  connect();
  a->record().message_room = b->record().message_room = 0;
  for (WorkId work = 1; work <= kMessageSlots; ++work) {
    ASSERT_EQ(a->domain->send(kA, work, Bytes(kMaxMessageBytes, std::byte{1})), Posted::kYes);
    ASSERT_EQ(b->domain->send(kB, work, Bytes(kMaxMessageBytes, std::byte{2})), Posted::kYes);
  }
  EXPECT_EQ(a->domain->send(kA, 99, Bytes(1)), Posted::kBusy);
  post(50, 64, b->rkey);
  EXPECT_FALSE(ended(50).has_value());
  run([&] { return b->domain->deregister_region(b->rkey); }, "the key to be revoked");
  EXPECT_EQ(a->record().order.size(), 1U);
  EXPECT_TRUE(b->record().order.empty());

  a->record().message_room = b->record().message_room = kMessageSlots;
  run([&] { return a->record().order.size() == 1 + kMessageSlots && b->record().order.size() == kMessageSlots; },
      "the messages to be taken");
  for (WorkId work = 1; work <= kMessageSlots; ++work) {
    EXPECT_TRUE(a->record().succeeded(work) && b->record().succeeded(work)) << work;
  }
  EXPECT_EQ(a->domain->send(kA, 99, Bytes(1)), Posted::kYes);
}

TEST_P(Libfabric, AWrongKeyOrRangeFailsItsBatchAndNothingElse) {
  connect();
  test::fill_random(a->memory.data(), a->memory.size(), 3);
  post(1, 4, b->rkey ^ 1);
  post(2, 4, b->rkey, kBytes - 4096);  // its later pages lie outside
  post(3, 4, b->rkey);
  EXPECT_EQ(ended(1)->code, ErrorCode::kUnknownRegion);
  EXPECT_EQ(ended(2)->code, ErrorCode::kOutOfRange);
  EXPECT_FALSE(ended(3).has_value());
  run([&] { return b->record().counted == 4; }, "the good batch's immediates");
  EXPECT_EQ(b->memory[kBytes - 4096], std::byte{0});
  EXPECT_TRUE(a->record().down.empty());
}

TEST_P(Libfabric, ARevokedKeyIsNotWrittenAnyMore) {
  connect();
  post(1, 64, b->rkey);  // a learns b's key
  EXPECT_FALSE(ended(1).has_value());
  post(2, 64, b->rkey);
  run([&] { return b->domain->deregister_region(b->rkey); }, "the key to be revoked");
  // All work has ended: later writes find memory of another owner.
  (void)ended(2);
  std::fill(b->memory.begin(), b->memory.end(), std::byte{0});
  test::fill_random(a->memory.data(), a->memory.size(), 4);
  post(3, 64, b->rkey);
  EXPECT_EQ(ended(3)->code, ErrorCode::kUnknownRegion);
  EXPECT_EQ(b->memory, std::vector<std::byte>(kBytes));
  EXPECT_TRUE(b->domain->deregister_region(b->rkey));
}

TEST_P(Libfabric, APeerThatReceivedARegionHasToReleaseItOrLoseIt) {
  connect();
  post(1, 1, b->rkey);
  EXPECT_FALSE(ended(1).has_value());
  // a sleeps.
  for (int turn = 0; turn < 100; ++turn) {
    ASSERT_FALSE(b->domain->deregister_region(b->rkey));
    b->domain->poll();
  }
  test::fence(*b->domain, kB);
  EXPECT_TRUE(b->domain->deregister_region(b->rkey));
}

// Devices that register memory with each endpoint (Slingshot's), as far as they can be tested here.
TEST_P(Libfabric, MemoryOfEachEndpoint) {
  open({.memory_per_endpoint = true});
  connect();
  connect(kA + 1, kB + 1);
  test::fill_random(a->memory.data(), a->memory.size(), 7);
  post(1, 16, b->rkey);
  post(2, 16, b->rkey, 16 * 8192, kA + 1);
  EXPECT_FALSE(ended(1).has_value());
  EXPECT_FALSE(ended(2).has_value());
  for (size_t page = 0; page < 32; ++page) {
    EXPECT_EQ(std::memcmp(a->memory.data() + page % 16 * 8192, b->memory.data() + page * 8192, 4096), 0) << page;
  }
  test::fence(*b->domain, kB + 1);
  run([&] { return b->domain->deregister_region(b->rkey); }, "the key to be revoked");
  post(3, 1, b->rkey);
  EXPECT_EQ(ended(3)->code, ErrorCode::kUnknownRegion);
  EXPECT_TRUE(a->domain->deregister_region(a->rkey));
}

TEST_P(Libfabric, AfterFenceNothingLandsAndThePeerIsNotified) {
  connect();
  test::fill_random(a->memory.data(), a->memory.size(), 5);
  for (WorkId work = 1; work <= 20; ++work) post(work, 64, b->rkey);
  run([&] { return b->record().counted > 64; }, "some pages");
  run([&] { return b->domain->fence(kB); }, "the fence");
  std::fill(b->memory.begin(), b->memory.end(), std::byte{0});
  const uint64_t counted = b->record().counted;
  run([&] { return !a->record().down.empty(); }, "the peer to notice");
  EXPECT_EQ(a->record().down[0].link, kA);
  EXPECT_EQ(a->record().down[0].error.code, ErrorCode::kPeerDown);
  run([&] { return a->domain->fence(kA); }, "the peer's fence");
  EXPECT_EQ(a->record().completed.size(), 20U);  // each once: the record checks it
  EXPECT_EQ(a->record().down.size(), 1U);
  EXPECT_EQ(b->memory, std::vector<std::byte>(kBytes));
  EXPECT_EQ(b->record().counted, counted);
  EXPECT_TRUE(b->record().down.empty());
  post(99, 1, b->rkey);
  EXPECT_EQ(a->record().failure(99), ErrorCode::kPeerDown);
}

TEST_P(Libfabric, AFenceEndsWhatWasPostedOnItsSide) {
  open({.look = std::chrono::milliseconds(10), .silence = std::chrono::milliseconds(300)});
  connect();
  post(1, 1, b->rkey);
  EXPECT_FALSE(ended(1).has_value());
  for (WorkId work = 2; work <= 20; ++work) post(work, 64, b->rkey);
  ASSERT_EQ(a->domain->send(kA, 21, Bytes(5)), Posted::kYes);
  EXPECT_FALSE(a->domain->fence(kA));
  post(22, 1, b->rkey);  // too late
  EXPECT_EQ(a->record().failure(22), ErrorCode::kPeerDown);
  // b sleeps: this is 5 MiB, and only the fence can end the last of it.
  test::fence(*a->domain, kA);
  EXPECT_EQ(a->record().completed.size(), 22U);
  EXPECT_EQ(a->record().failure(20), ErrorCode::kPeerDown);
  EXPECT_EQ(a->record().failure(21), ErrorCode::kPeerDown);
  EXPECT_TRUE(a->record().down.empty());
  run([&] { return !b->record().down.empty(); }, "the other end");
  EXPECT_TRUE(a->domain->fence(1234));  // an unknown link
}

// Many users end the link as soon as they find that everything has arrived.
TEST_P(Libfabric, WhatWasCountedOrTakenEndsWellThoughTheReceiverFencesAtOnce) {
  constexpr LinkId kTimes = 50;
  open({.bye = kLong});
  b->domain->on_completion = [this](const Completion& completion) {
    const bool is_last = completion.kind == Completion::Kind::kMessage ||
                         (completion.kind == Completion::Kind::kImmediate && b->record().counted % 64 == 0);
    if (is_last) (void)b->domain->fence(completion.link);
  };
  for (LinkId time = 1; time <= 2 * kTimes; ++time) {
    connect(1000 + time, 2000 + time);
    warm_up(1000 + time);
    if (time <= kTimes) {
      post(time, 64, b->rkey, 0, 1000 + time);
    } else {
      ASSERT_EQ(a->domain->send(1000 + time, time, Bytes(100)), Posted::kYes);
    }
    run([&] { return a->record().completed.count(time) == 1; }, "the work to end");
    ASSERT_TRUE(a->record().succeeded(time)) << time << ": " << a->record().completed[time]->to_string();
    run([&] { return b->domain->fence(2000 + time) && a->domain->fence(1000 + time); }, "both fences");
  }
}

// The same if the sender has no turn until the receiver is gone.
TEST_P(Libfabric, WhatWasCountedOrTakenEndsWellThoughTheSenderSleeps) {
  if (GetParam() == "sockets") open({.bye = kLong});  // it has a thread that needs its turn
  connect();
  warm_up(kA);
  post(2, 64, b->rkey);
  ASSERT_EQ(a->domain->send(kA, 3, Bytes(100)), Posted::kYes);
  run([&] { return b->record().counted == 64 && b->record().messages.size() == 1; }, "everything");
  test::fence(*b->domain, kB);
  run([&] { return !a->record().down.empty() && a->domain->fence(kA); }, "the end");
  EXPECT_TRUE(a->record().succeeded(2));
  EXPECT_TRUE(a->record().succeeded(3));
}

TEST_P(Libfabric, AnUnusedOfferIsVoidOnceItIsWithdrawn) {
  const Bytes offer = must(a->domain->offer(kA));
  const Bytes answer = must(b->domain->accept(kB, offer));
  EXPECT_TRUE(a->domain->fence(kA));  // withdraws the offer
  const Status completed = a->domain->complete(kA, answer);
  ASSERT_FALSE(completed.ok());
  EXPECT_EQ(completed.error().code, ErrorCode::kUnknownPeer);
}

TEST_P(Libfabric, AnOffererThatCompletesTooLateLearnsIt) {
  const Bytes answer = must(b->domain->accept(kB, must(a->domain->offer(kA))));
  run([&] { return b->domain->fence(kB); }, "the acceptor's fence");
  ASSERT_TRUE(a->domain->complete(kA, answer).ok());
  run([&] { return !a->record().down.empty(); }, "the offerer to learn it");
}

TEST_P(Libfabric, ASilentPeerIsGone) {
  open({.look = std::chrono::milliseconds(10),
        .ping_after = std::chrono::milliseconds(30),
        .silence = std::chrono::milliseconds(300),
        .hello = std::chrono::milliseconds(300)});
  connect();
  post(1, 1, b->rkey);
  EXPECT_FALSE(ended(1).has_value());
  // While both are alive, pings interrupt the silence.
  const auto until = Clock::now() + std::chrono::milliseconds(500);
  run([&] { return Clock::now() > until; }, "time");
  EXPECT_TRUE(a->record().down.empty());
  EXPECT_TRUE(b->record().down.empty());
  // b stops.
  run({a.get()}, [&] { return !a->record().down.empty(); }, "the silence to be noticed");
  EXPECT_EQ(a->record().down[0].error.code, ErrorCode::kPeerDown);
}

TEST_P(Libfabric, AnOffererThatNeverCompletesIsGone) {
  open({.look = std::chrono::milliseconds(10), .hello = std::chrono::milliseconds(100)});
  must(b->domain->accept(kB, must(a->domain->offer(kA))));
  run({b.get()}, [&] { return !b->record().down.empty(); }, "the offerer to be given up");
  EXPECT_NE(b->record().down[0].error.message.find("did not complete"), std::string::npos);
}

TEST_P(Libfabric, APeerThatIsGoneIsDownWhateverCallFindsOut) {
  connect();
  post(1, 1, b->rkey);
  EXPECT_FALSE(ended(1).has_value());
  b->domain.reset();  // without any message
  for (WorkId work = 2; a->record().down.empty(); ++work) {
    post(work, 1, b->rkey);
    const auto done = [&] { return a->record().completed.count(work) == 1; };
    ASSERT_NO_FATAL_FAILURE(run({a.get()}, done, "the batch to end"));
    ASSERT_TRUE(a->record().completed[work].has_value()) << "it was written to nobody";
    EXPECT_EQ(a->record().completed[work]->code, ErrorCode::kPeerDown) << a->record().completed[work]->to_string();
  }
  EXPECT_EQ(a->record().down[0].error.code, ErrorCode::kPeerDown) << a->record().down[0].error.to_string();
}

// Far more links than one poll() handles. Links without traffic for a long time get their turn, and links with traffic
// do not wait for it.
TEST_P(Libfabric, NoLinkStarvesAmongMany) {
  constexpr LinkId kLinks = 40;
  for (LinkId i = 0; i < kLinks; ++i) connect(100 + i, 200 + i);
  const auto until = Clock::now() + std::chrono::milliseconds(200);
  run([&] { return Clock::now() > until; }, "the links to become idle");
  WorkId posted = 0;
  for (LinkId i = 0; i < kLinks; ++i) {
    ASSERT_EQ(a->domain->send(100 + i, 1000 + i, Bytes(8)), Posted::kYes);
  }
  run(
      [&] {
        if (posted == 0 || a->record().completed.count(posted) == 1) post(++posted, 64, b->rkey, 0, 100);
        return b->record().messages.size() == kLinks && a->record().order.size() >= kLinks + 20;
      },
      "all messages beside the writes");
  for (LinkId i = 0; i < kLinks; ++i) EXPECT_TRUE(a->record().succeeded(1000 + i)) << i;
}

TEST_P(Libfabric, BytesThatAreNoCardAreRefused) {
  const Bytes offer = must(a->domain->offer(kA));
  for (size_t length = 0; length < offer.size(); ++length) {
    const Result<Bytes> answer = b->domain->accept(kB, std::span(offer).first(length));
    ASSERT_FALSE(answer.ok()) << length;
    EXPECT_EQ(answer.error().code, ErrorCode::kInvalidArgument);
  }
  Card card = Card::decode("accept", offer).value();
  card.protocol ^= 1;
  const Result<Bytes> foreign = b->domain->accept(kB, card.encode());
  ASSERT_FALSE(foreign.ok());
  EXPECT_EQ(foreign.error().code, ErrorCode::kRefused);
  EXPECT_FALSE(a->domain->complete(77, offer).ok());
}

TEST_P(Libfabric, AStrangersSecretDoesNotComplete) {
  const Bytes offer = must(a->domain->offer(kA));
  Card card = Card::decode("accept", must(b->domain->accept(kB, offer))).value();
  card.secret ^= 1;
  const Status completed = a->domain->complete(kA, card.encode());
  ASSERT_FALSE(completed.ok());
  EXPECT_EQ(completed.error().code, ErrorCode::kInvalidArgument);
}

// --- Devices

TEST(LibfabricMemory, OfAGpuIsNotReachable) {
  if (!library()) GTEST_SKIP() << library().error().to_string();
  if (test::find_driver() == nullptr) GTEST_SKIP() << "needs a CUDA driver or its stand-in";
  const test::GpuBuffer buffer(must(cuda::Context::retain(0)), 1 << 20);
  const End end("tcp");
  ASSERT_NE(end.domain, nullptr) << end.reason;
  const Result<uint64_t> region = end.domain->register_region(buffer.data(), buffer.bytes);
  ASSERT_FALSE(region.ok());
  EXPECT_EQ(region.error().code, ErrorCode::kNotReachable);
  EXPECT_NE(region.error().message.find("bounce over libfabric"), std::string::npos) << region.error().message;
}

TEST(LibfabricShm, LeadsToOtherProcessesOfThisMachineOnly) {
  End a("shm");
  End b("shm");
  if (a.domain == nullptr) GTEST_SKIP() << a.reason;
  Card card = must(Card::decode("accept", must(a.domain->offer(1))));
  const auto accept = [&b](const Card& offer) { return b.domain->accept(2, offer.encode()); };
  EXPECT_EQ(accept(card).error().code, ErrorCode::kNotReachable);  // this process itself
  card.pid = static_cast<uint32_t>(::getppid());
  EXPECT_TRUE(accept(card).ok());
  card.machine.shared_memory ^= 1;
  EXPECT_EQ(accept(card).error().code, ErrorCode::kNotReachable);
}

TEST(LibfabricDevice, UnknownNamesAreRefusedWithWhatToDo) {
  if (!library()) GTEST_SKIP() << library().error().to_string();
  for (const char* device : {"nonsense", "tcp:nonsense0", "efa:nonsense-rdm"}) {
    const End end(device);
    ASSERT_EQ(end.domain, nullptr);
    EXPECT_NE(end.reason.find("REFUSED"), std::string::npos) << end.reason;
    EXPECT_NE(end.reason.find("fi_info"), std::string::npos) << end.reason;
  }
}

TEST(LibfabricDevice, WhatDoesNotOutliveItsPeerIsRefusedWithTheReason) {
  if (!library()) GTEST_SKIP() << library().error().to_string();
  const End layered("tcp;ofi_rxm");
  ASSERT_EQ(layered.domain, nullptr);
  EXPECT_NE(layered.reason.find("REFUSED"), std::string::npos) << layered.reason;
  EXPECT_NE(layered.reason.find("use tcp by itself"), std::string::npos) << layered.reason;
  if (FI_VERSION_GE(library().value()->version, FI_VERSION(2, 5))) return;
  const End shm("shm");
  ASSERT_EQ(shm.domain, nullptr);
  EXPECT_NE(shm.reason.find("REFUSED"), std::string::npos) << shm.reason;
  EXPECT_NE(shm.reason.find("use the host lane"), std::string::npos) << shm.reason;
}

TEST(LibfabricDevice, VerbsUnderOfiRxmIsRefusedBefore25) {
  if (!library()) GTEST_SKIP() << library().error().to_string();
  const End layered("verbs;ofi_rxm");
  if (layered.domain == nullptr && layered.reason.find("has no provider") != std::string::npos) {
    GTEST_SKIP() << "needs an RDMA NIC: " << layered.reason;
  }
  if (FI_VERSION_GE(library().value()->version, FI_VERSION(2, 5))) {
    EXPECT_EQ(layered.reason.find("use the verbs lane"), std::string::npos) << layered.reason;
    return;
  }
  ASSERT_EQ(layered.domain, nullptr);
  EXPECT_NE(layered.reason.find("REFUSED"), std::string::npos) << layered.reason;
  EXPECT_NE(layered.reason.find("use the verbs lane"), std::string::npos) << layered.reason;
}

// In a separate process, which inherits the variable, because an opened library stays loaded.
TEST(LibfabricLibraryDeathTest, AWrongPathIsSaid) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const char* const before = std::getenv("KV_CONNECTOR_LIBFABRIC");
  const std::string kept = before == nullptr ? "" : before;
  setenv("KV_CONNECTOR_LIBFABRIC", "/nowhere/libfabric.so.1", 1);
  EXPECT_EXIT(
      {
        const End end("tcp");
        std::fputs(end.reason.c_str(), stderr);
        std::exit(end.domain == nullptr ? 0 : 1);
      },
      testing::ExitedWithCode(0), "KV_CONNECTOR_LIBFABRIC names no usable library.*/nowhere/libfabric.so.1");
  setenv("KV_CONNECTOR_LIBFABRIC", kept.c_str(), 1);
}

// Path of the libfabric that the dynamic linker finds; empty: there is none. library() would load it, so it is not used
// here.
std::string path_of_libfabric() {
  void* const handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  Dl_info info{};
  if (handle == nullptr || dladdr(dlsym(handle, "fi_version"), &info) == 0) return {};
  return info.dli_fname;
}

// Ends this process, which has loaded nothing so far. Exit status 0: the library's variable was written before the
// transfer thread of this lane opened its domain.
[[noreturn]] void open_with_plugins(const std::string& installed, const std::string& lane) {
  std::string directory = std::filesystem::temp_directory_path() / "kvc-libfabric-XXXXXX";
  if (mkdtemp(directory.data()) == nullptr) std::exit(2);
  const std::string chosen = directory + "/libfabric.so.1";
  std::filesystem::create_symlink(installed, chosen);
  std::filesystem::create_directory(directory + "/libfabric");  // the directory of its plug-ins
  setenv("KV_CONNECTOR_LIBFABRIC", chosen.c_str(), 1);
  unsetenv("FI_PROVIDER_PATH");
  bool written = false;
  EngineConfig config = test::config("engine", lane);
  config.open = [&](const DomainConfig& domain, ControlQueue& control) {
    written = std::getenv("FI_PROVIDER_PATH") != nullptr;
    return open_domain(domain, control);
  };
  must(TransferEngine::create(std::move(config)), "create");
  std::filesystem::remove_all(directory);
  std::exit(written ? 0 : 1);
}

TEST(LibfabricLibraryDeathTest, TheEnvironmentIsWrittenBeforeTheEngineHasAThread) {
  // Such a process runs the test from its beginning.
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const std::string installed = path_of_libfabric();
  if (installed.empty()) GTEST_SKIP() << "needs libfabric.so.1 on this machine";
  const char* const lanes = std::getenv("KVC_TEST_PROVIDERS");
  const std::string kept = lanes == nullptr ? "" : lanes;
  setenv("KVC_TEST_PROVIDERS", "sim", 1);  // otherwise providers() opens the library when the process begins
  for (const char* lane : {"libfabric:tcp", "shuffle:libfabric:tcp", "bounce:libfabric:tcp"}) {
    EXPECT_EXIT(open_with_plugins(installed, lane), testing::ExitedWithCode(0), "") << lane;
  }
  lanes == nullptr ? unsetenv("KVC_TEST_PROVIDERS") : setenv("KVC_TEST_PROVIDERS", kept.c_str(), 1);
}

TEST(LibfabricWire, ACardComesBackAsItWent) {
  Card card;
  card.provider = "tcp;ofi_rxm";
  card.protocol = 7;
  card.protocol_version = 2;
  card.address_format = 3;
  card.secret = 0x1122334455667788;
  card.machine = {"boot", 5, 6};
  card.pid = 4711;
  card.address = Bytes(200, std::byte{9});
  card.doorbell = {1, 2, Bytes(40, std::byte{1})};
  const Card back = Card::decode("accept", card.encode()).value();
  EXPECT_EQ(back.encode(), card.encode());
  EXPECT_EQ(back.doorbell.key.size(), 40U);
  EXPECT_EQ(back.machine.boot_id, "boot");
}

}  // namespace
}  // namespace kvc::libfabric
