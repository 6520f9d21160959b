// The number of NIC objects that each peer needs: whole transfer engines over the stand-in for libibverbs.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "providers/verbs/connector.h"
#include "tests/rig.h"
#include "tests/verbs_fake.h"
#include "tests/verbs_fake_library.h"

namespace kvc::verbs {
namespace {

constexpr size_t kPeers = 20;
constexpr size_t kNics = 2;
constexpr size_t kPage = 4096;
constexpr size_t kEnds = 2;        // per link, both of them in this process
constexpr size_t kQueuePairs = 2;  // per end: one for writes, one for messages

EngineConfig over_fake_nics(const std::string& name) {
  EngineConfig config;
  config.name = name;
  for (size_t nic = 0; nic < kNics; ++nic) {
    DomainConfig& domain = config.domains.emplace_back();
    domain.provider = "verbs";
    domain.device = "nic" + std::to_string(nic);
  }
  config.open = [](const DomainConfig& domain, ControlQueue& control) {
    return VerbsConnector::open(domain, control, fake::Fabric::library(), {});
  };
  return config;
}

// Every transfer engine has two NICs, so that a peer can have two links.
struct Cluster : fake::Fabric {
  struct Member {
    std::unique_ptr<test::Side> side;
    PeerId peer = 0;  // the hub's id of it
    RemoteRegionId region = 0;
  };

  Cluster() {
    for (uint8_t nic = 0; nic < kNics; ++nic) add_roce("nic" + std::to_string(nic), nic + 1);
    hub = std::make_unique<test::Side>(over_fake_nics("hub"), kPage);
    for (size_t i = 0; i < kPeers; ++i) {
      Member& member = members.emplace_back();
      member.side = std::make_unique<test::Side>(over_fake_nics("member"), kPage);
      member.peer = test::connect(*hub->engine, *member.side->engine).first_to_second;
      member.region = test::must(hub->engine->import_region(
          member.peer, test::must(member.side->engine->region_descriptor(member.side->region))));
    }
  }

  void write_to(const Member& member) {
    const TransferId write =
        test::must(hub->engine->write_one(member.peer, hub->region, 0, member.region, 0, kPage, std::nullopt));
    EXPECT_EQ(test::ended(*hub->engine, write).kind, EventKind::kTransferDone);
  }
  // The number of queue pairs once the hub, and its members together, have this many links.
  size_t queue_pairs_with_links(size_t links) {
    const auto up = [&] {
      size_t theirs = 0;
      for (const Member& member : members) theirs += member.side->engine->stats().links;
      return hub->engine->stats().links == links && theirs == links;
    };
    const auto limit = std::chrono::steady_clock::now() + test::kLimit;
    while (!up() && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    EXPECT_EQ(hub->engine->stats().links, links);
    return live_queue_pairs();
  }

  std::unique_ptr<test::Side> hub;
  std::vector<Member> members;
};

TEST(VerbsPeers, APeerCostsTwoQueuePairsForEachPairOfNicsThatIsInUse) {
  Cluster cluster;
  constexpr size_t kALink = kEnds * kQueuePairs;
  EXPECT_EQ(cluster.queue_pairs_with_links(kPeers), kPeers * kALink) << "one link, over one pair of NICs";
  cluster.write_to(cluster.members.front());
  EXPECT_EQ(cluster.queue_pairs_with_links(kPeers + 1), (kPeers + 1) * kALink) << "and the other, of who is written to";
  for (const Cluster::Member& member : cluster.members) cluster.write_to(member);
  EXPECT_EQ(cluster.queue_pairs_with_links(kNics * kPeers), kNics * kPeers * kALink);
  cluster.write_to(cluster.members.front());
  EXPECT_EQ(cluster.live_queue_pairs(), kNics * kPeers * kALink) << "what is used is used again";
}

}  // namespace
}  // namespace kvc::verbs
