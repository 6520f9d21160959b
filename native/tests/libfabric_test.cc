// The libfabric provider by itself: two domains in one process, driven by one thread. What it does under an engine is
// in engine_test.cc, which runs over it too; shm, which leads to other processes only, is in tests/conformance.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "engine/immediate.h"
#include "providers/libfabric/domain.h"
#include "providers/libfabric/library.h"
#include "providers/libfabric/wire.h"
#include "tests/domain_test_support.h"
#include "tests/rig.h"

#ifdef __SANITIZE_ADDRESS__
// Libfabric's "net" (1.17) loses 1 KB with each endpoint, in fi_endpoint().
extern "C" [[gnu::visibility("default")]] const char*
__lsan_default_suppressions();  // NOLINT: the sanitizer's own name
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric.so\n"; }  // NOLINT
#endif

namespace kvc::libfabric {
namespace {

using test::RecordingSink;
using test::run_until;

constexpr size_t kBytes = 1 << 20;

// A domain with one registered region.
struct End {
  explicit End(const std::string& device, const Tuning& tuning = {}) : memory(kBytes) {
    DomainConfig config;
    config.provider = "libfabric";
    config.device = device;
    Result<std::unique_ptr<LibfabricDomain>> opened = LibfabricDomain::open(config, sink, tuning);
    if (!opened) {
      reason = opened.error().to_string();
      return;
    }
    domain = std::move(opened.value());
    rkey = domain->register_region(memory.data(), memory.size(), -1, 0).value();
  }

  std::string reason;  // why there is no domain
  RecordingSink sink;
  std::vector<std::byte> memory;
  std::unique_ptr<LibfabricDomain> domain;
  uint64_t rkey = 0;
};

const std::vector<std::string> kDevices = {
    "tcp",
#ifndef __SANITIZE_THREAD__  // its progress thread is not compiled for the sanitizer, which misses how it synchronises
    "sockets",
#endif
};

class Libfabric : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { open({}); }
  void open(const Tuning& tuning) {
    a = std::make_unique<End>(GetParam(), tuning);
    b = std::make_unique<End>(GetParam(), tuning);
    if (a->domain == nullptr) GTEST_SKIP() << a->reason;
    ASSERT_NE(b->domain, nullptr) << b->reason;
  }
  void connect() {
    const Result<Bytes> offer = a->domain->offer(kA);
    ASSERT_TRUE(offer.ok()) << offer.error().to_string();
    const Result<Bytes> answer = b->domain->accept(kB, offer.value());
    ASSERT_TRUE(answer.ok()) << answer.error().to_string();
    const Status completed = a->domain->complete(kA, answer.value());
    ASSERT_TRUE(completed.ok()) << completed.error().to_string();
  }
  void run(const std::function<bool()>& done, const char* what) {
    run_until({a->domain.get(), b->domain.get()}, done, what);
  }
  // a writes `pages` pages of 4 KiB from the same offsets as it writes to, the last page first.
  void post(WorkId work, uint32_t pages, uint64_t rkey, uint64_t first_offset = 0) {
    std::vector<PageWrite> list;
    for (uint32_t page = pages; page > 0; --page) {
      const uint64_t offset = uint64_t{page - 1} * 8192;  // with gaps: no two follow each other
      list.push_back({a->memory.data() + offset, first_offset + offset});
    }
    WriteBatch batch;
    batch.work = work;
    batch.rkey = rkey;
    batch.target_base = reinterpret_cast<uintptr_t>(b->memory.data());
    batch.page_bytes = 4096;
    batch.counted = true;
    batch.immediate = Immediate{7, 3, pages}.encode();
    batch.pages = list;
    ASSERT_EQ(a->domain->post(kA, batch), Posted::kYes);
  }
  std::optional<Error> ended(WorkId work) {
    run([&] { return a->sink.completed.count(work) == 1; }, "the batch to end");
    return a->sink.completed[work];
  }

  static constexpr LinkId kA = 11;
  static constexpr LinkId kB = 22;
  std::unique_ptr<End> a;
  std::unique_ptr<End> b;
};

INSTANTIATE_TEST_SUITE_P(Devices, Libfabric, testing::ValuesIn(kDevices),
                         [](const auto& info) { return test::label(info.param); });

TEST_P(Libfabric, SaysWhatItIs) {
  EXPECT_EQ(a->domain->description().rfind("libfabric ", 0), 0U) << a->domain->description();
  EXPECT_NE(a->domain->description().find(library().value()->path), std::string::npos);
}

TEST_P(Libfabric, PagesLandAndAreCountedOverTheirLink) {
  connect();
  test::fill_random(a->memory.data(), a->memory.size(), 1);
  post(1, 64, b->rkey);
  EXPECT_FALSE(ended(1).has_value());
  run([&] { return b->sink.counted == 64; }, "the immediates");
  for (size_t page = 0; page < 64; ++page) {
    EXPECT_EQ(std::memcmp(a->memory.data() + page * 8192, b->memory.data() + page * 8192, 4096), 0) << page;
    EXPECT_EQ(b->memory[page * 8192 + 4096], std::byte{0}) << page;
  }
  for (const LinkId link : b->sink.immediate_links) EXPECT_EQ(link, kB);
  EXPECT_TRUE(a->sink.immediates.empty());
}

TEST_P(Libfabric, PagesThatFollowEachOtherGoAsOneWrite) {
  connect();
  test::fill_random(a->memory.data(), a->memory.size(), 2);
  std::vector<PageWrite> pages;
  for (size_t page = 0; page < 16; ++page) pages.push_back({a->memory.data() + page * 1000, 5 + page * 1000});
  const WriteBatch batch{.work = 1,
                         .rkey = b->rkey,
                         .page_bytes = 1000,
                         .counted = true,
                         .immediate = Immediate{1, 1, 16}.encode(),
                         .pages = pages};
  ASSERT_EQ(a->domain->post(kA, batch), Posted::kYes);
  EXPECT_FALSE(ended(1).has_value());
  run([&] { return b->sink.counted == 16; }, "the immediate");
  EXPECT_EQ(b->sink.immediates.size(), 1U);
  EXPECT_EQ(std::memcmp(a->memory.data(), b->memory.data() + 5, 16000), 0);
}

TEST_P(Libfabric, AnImmediateWithoutPagesStandsForAll) {
  connect();
  const std::vector<PageWrite> pages(9);
  const WriteBatch batch{.work = 1, .counted = true, .immediate = Immediate{1, 1, 9}.encode(), .pages = pages};
  ASSERT_EQ(a->domain->post(kA, batch), Posted::kYes);
  EXPECT_FALSE(ended(1).has_value());
  run([&] { return b->sink.counted == 9; }, "the immediate");
}

TEST_P(Libfabric, TheAcceptorMayPostAtOnce) {
  const Bytes offer = a->domain->offer(kA).value();
  const Bytes answer = b->domain->accept(kB, offer).value();
  const PageWrite page{b->memory.data(), 0};
  const WriteBatch batch{.work = 5, .rkey = a->rkey, .page_bytes = 4096, .pages = {&page, 1}};
  ASSERT_EQ(b->domain->post(kB, batch), Posted::kYes);
  ASSERT_TRUE(a->domain->complete(kA, answer).ok());
  run([&] { return b->sink.succeeded(5); }, "the acceptor's write");
}

// More immediates than a window holds, without one turn of the receiver's until the sender has come to a stop.
TEST_P(Libfabric, AReceiverThatSleepsIsNotOverrun) {
  connect();
  constexpr WorkId kBatches = 100;
  WorkId posted = 0;
  run(
      [&] {
        while (posted < kBatches && posted - a->sink.order.size() < 16) post(++posted, 64, b->rkey);
        return a->sink.order.size() == kBatches;
      },
      "all batches");
  run([&] { return b->sink.counted == kBatches * 64; }, "all immediates");
  for (const auto& [work, error] : a->sink.completed) EXPECT_FALSE(error.has_value()) << error->to_string();
}

TEST_P(Libfabric, MessagesArriveOnceAndWaitForRoom) {
  connect();
  b->sink.message_room = 0;
  std::vector<Bytes> sent;
  WorkId work = 0;
  for (size_t bytes : {size_t{1}, size_t{100}, kMaxMessageBytes}) {
    sent.push_back(Bytes(bytes, static_cast<std::byte>(bytes % 251)));
    ASSERT_EQ(a->domain->send(kA, ++work, sent.back()), Posted::kYes);
  }
  post(50, 1, b->rkey);  // messages that are not taken do not stop writes
  EXPECT_FALSE(ended(50).has_value());
  EXPECT_TRUE(b->sink.messages.empty());
  EXPECT_FALSE(a->sink.succeeded(1));
  b->sink.message_room = 10;
  run([&] { return a->sink.succeeded(1) && a->sink.succeeded(2) && a->sink.succeeded(3); }, "the messages");
  ASSERT_EQ(b->sink.messages.size(), 3U);
  std::sort(b->sink.messages.begin(), b->sink.messages.end(),
            [](const auto& left, const auto& right) { return left.second.size() < right.second.size(); });
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(b->sink.messages[i].first, kB);
    EXPECT_EQ(b->sink.messages[i].second, sent[i]);
  }
  EXPECT_EQ(a->domain->send(kA, 9, {}), Posted::kYes);
  EXPECT_EQ(a->sink.completed[9]->code, ErrorCode::kInvalidArgument);
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
  run([&] { return b->sink.counted == 4; }, "the good batch's immediates");
  EXPECT_EQ(b->memory[kBytes - 4096], std::byte{0});
  EXPECT_TRUE(a->sink.down.empty());
}

TEST_P(Libfabric, ARevokedKeyIsNotWrittenAnyMore) {
  connect();
  post(1, 64, b->rkey);  // b's key becomes known to a
  EXPECT_FALSE(ended(1).has_value());
  post(2, 64, b->rkey);
  bool revoked = false;
  run([&] { return revoked = revoked || b->domain->deregister_region(b->rkey); }, "the key to be revoked");
  // Whatever was under way has ended: what comes now finds memory that is somebody else's.
  (void)ended(2);
  std::fill(b->memory.begin(), b->memory.end(), std::byte{0});
  test::fill_random(a->memory.data(), a->memory.size(), 4);
  post(3, 64, b->rkey);
  EXPECT_EQ(ended(3)->code, ErrorCode::kUnknownRegion);
  EXPECT_EQ(b->memory, std::vector<std::byte>(kBytes));
  EXPECT_TRUE(b->domain->deregister_region(b->rkey));
}

TEST_P(Libfabric, AfterFenceNothingLandsAndThePeerIsTold) {
  connect();
  test::fill_random(a->memory.data(), a->memory.size(), 5);
  for (WorkId work = 1; work <= 20; ++work) post(work, 64, b->rkey);
  run([&] { return b->sink.counted > 64; }, "some pages");
  bool fenced = b->domain->fence(kB);
  run([&] { return fenced = fenced || b->domain->fence(kB); }, "the fence");
  std::fill(b->memory.begin(), b->memory.end(), std::byte{0});
  const uint64_t counted = b->sink.counted;
  run([&] { return !a->sink.down.empty(); }, "the peer to notice");
  EXPECT_EQ(a->sink.down[0].link, kA);
  EXPECT_TRUE(a->sink.down[0].fenced);
  EXPECT_EQ(a->sink.completed.size(), 20U);  // each once: the sink checks
  EXPECT_EQ(b->memory, std::vector<std::byte>(kBytes));
  EXPECT_EQ(b->sink.counted, counted);
  EXPECT_TRUE(a->domain->fence(kA));
  post(99, 1, b->rkey);
  EXPECT_EQ(a->sink.completed[99]->code, ErrorCode::kPeerDown);
}

TEST_P(Libfabric, AFenceEndsWhatWasPostedOnItsSide) {
  connect();
  for (WorkId work = 1; work <= 20; ++work) post(work, 64, b->rkey);
  (void)a->domain->fence(kA);
  EXPECT_EQ(a->sink.completed.size(), 20U);
  EXPECT_EQ(a->sink.completed[20]->code, ErrorCode::kPeerDown);
  bool fenced = false;
  run([&] { return (fenced = fenced || a->domain->fence(kA)) && !b->sink.down.empty(); }, "both ends");
  EXPECT_TRUE(a->domain->fence(1234));  // never heard of
}

TEST_P(Libfabric, AnOfferThatNobodyTookIsFencedAtOnce) {
  ASSERT_TRUE(a->domain->offer(kA).ok());
  EXPECT_TRUE(a->domain->fence(kA));
}

TEST_P(Libfabric, ASilentPeerIsGone) {
  open({.look = std::chrono::milliseconds(10),
        .ping_after = std::chrono::milliseconds(30),
        .silence = std::chrono::milliseconds(300),
        .hello = std::chrono::milliseconds(300)});
  connect();
  post(1, 1, b->rkey);
  EXPECT_FALSE(ended(1).has_value());
  // While both live, silence is broken by pings.
  const auto until = Clock::now() + std::chrono::milliseconds(500);
  run([&] { return Clock::now() > until; }, "time");
  EXPECT_TRUE(a->sink.down.empty());
  EXPECT_TRUE(b->sink.down.empty());
  // b stops.
  run_until({a->domain.get()}, [&] { return !a->sink.down.empty(); }, "the silence to be noticed");
  EXPECT_EQ(a->sink.down[0].error.code, ErrorCode::kPeerDown);
}

TEST_P(Libfabric, APeerThatIsGoneIsDownWhateverCallFindsOut) {
  connect();
  post(1, 1, b->rkey);
  EXPECT_FALSE(ended(1).has_value());
  b->domain.reset();  // without a word
  for (WorkId work = 2; a->sink.down.empty(); ++work) {
    post(work, 1, b->rkey);
    const auto done = [&] { return a->sink.completed.count(work) == 1; };
    ASSERT_NO_FATAL_FAILURE(run_until({a->domain.get()}, done, "the batch to end"));
    ASSERT_TRUE(a->sink.completed[work].has_value()) << "it was written to nobody";
    EXPECT_EQ(a->sink.completed[work]->code, ErrorCode::kPeerDown) << a->sink.completed[work]->to_string();
  }
  EXPECT_EQ(a->sink.down[0].error.code, ErrorCode::kPeerDown) << a->sink.down[0].error.to_string();
}

TEST_P(Libfabric, BytesThatAreNoCardAreRefused) {
  const Bytes offer = a->domain->offer(kA).value();
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
  const Bytes offer = a->domain->offer(kA).value();
  Card card = Card::decode("accept", b->domain->accept(kB, offer).value()).value();
  card.secret ^= 1;
  const Status completed = a->domain->complete(kA, card.encode());
  ASSERT_FALSE(completed.ok());
  EXPECT_EQ(completed.error().code, ErrorCode::kInvalidArgument);
}

TEST(LibfabricShm, LeadsToOtherProcessesOfThisMachineOnly) {
  End a("shm");
  End b("shm");
  if (a.domain == nullptr) GTEST_SKIP() << a.reason;
  Card card = Card::decode("accept", a.domain->offer(1).value()).value();
  const auto accept = [&b](const Card& offer) { return b.domain->accept(2, offer.encode()); };
  EXPECT_EQ(accept(card).error().code, ErrorCode::kNotReachable);  // our own process
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
    GTEST_SKIP() << "no RDMA NIC here: " << layered.reason;
  }
  if (FI_VERSION_GE(library().value()->version, FI_VERSION(2, 5))) {
    EXPECT_EQ(layered.reason.find("use the verbs lane"), std::string::npos) << layered.reason;
    return;
  }
  ASSERT_EQ(layered.domain, nullptr);
  EXPECT_NE(layered.reason.find("REFUSED"), std::string::npos) << layered.reason;
  EXPECT_NE(layered.reason.find("use the verbs lane"), std::string::npos) << layered.reason;
}

// In a process of its own, which inherits the variable: a library once opened stays.
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
