// Registry, and the many regions that a peer may have in it: work under the lock that every write takes is bounded.
#include "engine/registry.h"

#include <array>
#include <memory>
#include <vector>

#include "tests/rig.h"

namespace kvc::test::registry {
namespace {

TEST(Registry, ErasesSomeAtATimeAndLooksAtNoOthers) {
  WriterFirstMutex mutex;
  Registry<const int> registry(mutex);
  std::vector<uint32_t> ids;
  for (uint32_t id = 1; id <= 2000; ++id) {
    registry.insert(id, std::make_shared<const int>(static_cast<int>(id)));
    if (id % 2 == 0) ids.push_back(id);
  }
  ASSERT_NE(registry.erase(2000), nullptr);  // an id may remain whose object is gone
  std::vector<std::shared_ptr<const int>> erased;
  EXPECT_FALSE(registry.erase_some(ids, 300, erased));
  EXPECT_EQ(erased.size(), 299U);
  EXPECT_EQ(ids.size(), 700U);
  EXPECT_EQ(registry.size(), 1700U);
  EXPECT_FALSE(registry.erase_some(ids, 699, erased));
  EXPECT_TRUE(registry.erase_some(ids, 699, erased));
  EXPECT_EQ(registry.size(), 1000U) << "the others";
  EXPECT_EQ(registry.all_if([](int value) { return value % 2 != 0; }).size(), 1000U);
  EXPECT_EQ(registry.all_if([](int value) { return value > 1900; }).size(), 50U);
}

// More regions than a fence forgets in one step, and than an import adds under one lock.
TEST(Registry, AFenceForgetsThousandsOfOnePeersRegionsAndNoOthers) {
  constexpr size_t kRegions = 2000;
  constexpr size_t kBytes = 64;
  Side writer(config("writer", "sim"), kBytes);
  std::array<Side, 2> peers{Side(config("first", "sim"), kRegions * kBytes),
                            Side(config("second", "sim"), kRegions * kBytes)};
  std::array<PeerId, 2> ids{};
  std::array<std::vector<RemoteRegionId>, 2> imported;
  for (size_t i = 0; i < peers.size(); ++i) {
    ids[i] = connect(*writer.engine, *peers[i].engine).first_to_second;
    std::vector<MemoryRange> ranges;
    for (size_t region = 0; region < kRegions; ++region) {
      ranges.push_back({peers[i].data() + region * kBytes, kBytes, peers[i].memory.fd(), region * kBytes});
    }
    const std::vector<RegionId> regions = must(peers[i].engine->register_memory(ranges));
    imported[i] = must(writer.engine->import_regions(ids[i], must(peers[i].engine->region_descriptor(regions))));
    ASSERT_EQ(imported[i].size(), kRegions);
  }
  must(writer.engine->fence(ids[0], kLimit));
  for (const size_t place : {size_t{0}, kRegions / 2, kRegions - 1}) {
    const TransferId transfer =
        must(writer.engine->write_one(ids[1], writer.region, 0, imported[1][place], 0, kBytes, {}));
    EXPECT_EQ(ended(*writer.engine, transfer).kind, EventKind::kTransferDone);
    EXPECT_EQ(writer.engine->write_one(ids[1], writer.region, 0, imported[0][place], 0, kBytes, {}).error().code,
              ErrorCode::kUnknownRegion);
  }
}

}  // namespace
}  // namespace kvc::test::registry
