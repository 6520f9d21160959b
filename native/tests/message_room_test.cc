// Room for untaken messages: as much as the transfer engine relies on in each domain. Messages about broken links
// therefore get through beside unread messages of users. Runs over each lane.

#include <cstring>
#include <set>
#include <vector>

#include "engine/message.h"
#include "engine/message_pool.h"
#include "tests/domain_test_support.h"
#include "tests/nics.h"
#include "tests/rig.h"

namespace kvc::test {
namespace {

class MessageRoom : public testing::TestWithParam<std::string> {
 protected:
  std::string provider() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Lanes, MessageRoom, testing::ValuesIn(providers()),
                         [](const auto& info) { return label(info.param); });

Bytes longest(uint32_t number) {
  Bytes bytes(kMaxUserMessageBytes);
  std::memcpy(bytes.data(), &number, sizeof(number));
  return bytes;
}

// A domain alone holds this many of the longest messages of each link and no more, whatever else the link carries.
TEST_P(MessageRoom, IsThatOfEachLink) {
  const auto open = [&](const char* name) {
    return
        [config = config(name, provider()).domains[0]](ControlQueue& control) { return open_domain(config, control); };
  };
  Driven a(open("sender"));
  Driven b(open("receiver"));
  b.record.message_room = 0;
  constexpr LinkId kLinks = 2;
  for (LinkId link = 0; link < kLinks; ++link) connect(a, b, kLinkOfA + link, kLinkOfB + link);
  Bytes message(kMaxMessageBytes);
  WorkId work = 0;
  for (LinkId link = kLinkOfA; link < kLinkOfA + kLinks; ++link) {
    for (uint32_t i = 0; i < kMessageSlots; ++i) {
      std::memcpy(message.data(), &++work, sizeof(work));
      run_until({&a, &b}, [&] { return a.send(link, work, message) == Posted::kYes; }, "room for a message");
    }
    run_idle({&a, &b});
    EXPECT_EQ(a.send(link, work + 1, message), Posted::kBusy);
  }
  EXPECT_TRUE(a.record.completed.empty()) << "ended before it was taken";
  b.record.message_room = SIZE_MAX;
  run_until({&a, &b}, [&] { return a.record.completed.size() == work; }, "the messages' ends");
  std::set<WorkId> came;
  for (const auto& [link, bytes] : b.record.messages) {
    WorkId number = 0;
    std::memcpy(&number, bytes.data(), sizeof(number));
    EXPECT_TRUE(came.insert(number).second);
    EXPECT_TRUE(a.record.succeeded(number));
  }
  EXPECT_EQ(came.size(), work);
  for (LinkId link = 0; link < kLinks; ++link) {
    fence(a, kLinkOfA + link);
    fence(b, kLinkOfB + link);
  }
}

// Both links are full of messages in both directions. When the NIC of one link dies, its traffic moves to the second
// link.
TEST_P(MessageRoom, FailoverFindsRoomBesideUnreadMessages) {
  constexpr size_t kPage = 4096;
  constexpr size_t kPages = 4000;
  Nics nics;
  Pair pair(nics.with(config("sender", provider(), 2)), config("receiver", provider(), 2), kPage * kPages);
  pair.make_links();
  TransferEngine& sender = *pair.sender.engine;
  TransferEngine& receiver = *pair.receiver.engine;
  struct End {
    TransferEngine& engine;
    PeerId to;
    uint32_t sent = 0;
    std::set<uint32_t> came{};
  };
  End ends[] = {{sender, pair.to_receiver}, {receiver, pair.to_sender}};
  for (End& end : ends) {
    while (true) {
      const Result<TransferId> sent = end.engine.send(end.to, longest(end.sent), [](const Event&) {});
      if (!sent.ok()) break;
      ++end.sent;
    }
    ASSERT_GT(end.sent, MessagePool::kRoomOfOne + 2 * kMessageSlots) << "not all the room is taken";
  }

  fill_random(pair.sender.data(), kPage * kPages, 1);
  const auto [set, immediate] = pair.counter(kPages);
  PagedWrite write{kPage, pair.sender.region, {}, pair.receiver_region, {}, immediate};
  write.source_pages = {shuffled(kPages, kPages, 2), kPage, 0};
  write.target_pages = write.source_pages;
  const TransferId transfer = must(sender.open_transfer(pair.to_receiver));
  must(sender.write_pages(transfer, write));
  must(sender.seal(transfer));
  await([&, set = set] { return pair.count(set) > kPages / 8; }, "the first pages");
  nics[0].die();
  const Event done = ended(sender, transfer);
  EXPECT_EQ(done.kind, EventKind::kTransferDone) << (done.error ? done.error->to_string() : "");
  must(receiver.wait_counters(set, kLimit));
  EXPECT_EQ(pair.count(set), kPages);
  EXPECT_EQ(std::memcmp(pair.sender.data(), pair.receiver.data(), kPage * kPages), 0);
  // All pages may arrive before the receiver has seen the end of its link.
  await([&] { return sender.stats().links_lost == 1 && receiver.stats().links_lost == 1; }, "the lost links");

  for (End& end : ends) {
    End& other = &end == &ends[0] ? ends[1] : ends[0];
    while (end.came.size() < other.sent) {
      const uint32_t number = number_of(must(end.engine.wait_message(kLimit)).bytes);
      ASSERT_TRUE(end.came.insert(number).second) << "message " << number << " came twice";
    }
    EXPECT_EQ(*end.came.rbegin(), other.sent - 1);
    EXPECT_TRUE(end.engine.receive(1).empty());
    EXPECT_TRUE(end.engine.poll_events(8).empty());
  }
}

}  // namespace
}  // namespace kvc::test
