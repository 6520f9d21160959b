// Memory of several kinds in a transfer engine with several lanes: each lane takes the memory that it reaches and
// reports the rest.

#include <optional>
#include <string>
#include <vector>

#include "tests/nics.h"
#include "tests/rig.h"

namespace kvc::test::memory_kinds {
namespace {

constexpr size_t kBytes = 8192;

// Two lanes, "sim" before "tcp", whose domains refuse some memory.
EngineConfig two_lanes(const std::string& name, size_t sim_domains = 1) {
  EngineConfig both;
  both.name = name;
  both.domains.resize(sim_domains + 1);
  for (DomainConfig& domain : both.domains) domain.provider = "sim";
  both.domains.back().provider = "tcp";
  return both;
}

auto refusal(ErrorCode code, const std::string& reason) {
  return [=](const MemoryRange&) { return std::optional(Error{code, "nic", {}, "register_memory", reason}); };
}
auto not_reached(const std::string& reason) { return refusal(ErrorCode::kNotReachable, reason); }

bool says(const Error& error, const std::string& reason) { return error.message.find(reason) != std::string::npos; }

TransferId write(Side& from, PeerId to, RemoteRegionId region) {
  return must(from.engine->write_one(to, from.region, 0, region, 0, kBytes, std::nullopt));
}
RemoteRegionId import_all(Side& from, PeerId peer, Side& of) {
  return must(from.engine->import_region(peer, must(of.engine->region_descriptor(of.region))));
}

TEST(MemoryKinds, ARegionIsThatOfTheLanesThatTakeIt) {
  Nics nics;
  nics[0].refuses = not_reached("sim has no use for it");
  Side side(nics.with(two_lanes("engine")), kBytes);
  Side over_sim(config("over-sim", "sim"), kBytes);
  Side over_tcp(config("over-tcp", "tcp"), kBytes);
  const Connection sim = connect(*side.engine, *over_sim.engine);
  const Connection tcp = connect(*side.engine, *over_tcp.engine);
  ASSERT_EQ(must(side.engine->lane(sim.first_to_second)), "sim");
  ASSERT_EQ(must(side.engine->lane(tcp.first_to_second)), "tcp");

  // As a source: accepted over the lane that takes it; over the second lane, the write fails with that lane's reason.
  const Event failed =
      ended(*side.engine, write(side, sim.first_to_second, import_all(side, sim.first_to_second, over_sim)));
  EXPECT_EQ(failed.kind, EventKind::kTransferFailed);
  ASSERT_TRUE(failed.error.has_value());
  EXPECT_EQ(failed.error->code, ErrorCode::kNotReachable);
  EXPECT_EQ(failed.error->peer, "over-sim");
  EXPECT_TRUE(failed.quiesced);
  EXPECT_TRUE(says(*failed.error, "sim has no use for it")) << failed.error->to_string();
  EXPECT_EQ(ended(*side.engine, write(side, tcp.first_to_second, import_all(side, tcp.first_to_second, over_tcp))).kind,
            EventKind::kTransferDone);

  // As a target: likewise.
  const Bytes descriptor = must(side.engine->region_descriptor(side.region));
  const Result<RemoteRegionId> refused = over_sim.engine->import_region(sim.second_to_first, descriptor);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kNotReachable);
  EXPECT_EQ(
      ended(*over_tcp.engine, write(over_tcp, tcp.second_to_first, import_all(over_tcp, tcp.second_to_first, side)))
          .kind,
      EventKind::kTransferDone);

  // A peer that learns of such a failure still works.
  EXPECT_EQ(ended(*side.engine, must(side.engine->send(sim.first_to_second, Bytes(1)))).kind, EventKind::kTransferDone);
  must(side.engine->deregister_memory(side.region, kLimit));
}

TEST(MemoryKinds, WhatNoLaneTakesIsRefusedWithTheReasonOfEach) {
  Nics nics;
  const auto engine = must(TransferEngine::create(nics.with(two_lanes("engine"))));
  nics[0].refuses = not_reached("sim has no use for it");
  nics[1].refuses = not_reached("tcp cannot read it");
  std::vector<std::byte> memory(kBytes);
  const Result<RegionId> refused = engine->register_memory(memory.data(), memory.size());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kNotReachable);
  EXPECT_TRUE(says(refused.error(), "sim has no use for it")) << refused.error().to_string();
  EXPECT_TRUE(says(refused.error(), "tcp cannot read it")) << refused.error().to_string();
  EXPECT_EQ(engine->stats().regions, 0U);
}

// If a lane reaches memory and cannot register it, the machine is faulty, unless the user accepts to work without that
// lane.
TEST(MemoryKinds, ALaneThatFailsIsPassedOverOnlyWhereFallbackIsAllowed) {
  for (const bool fallback : {false, true}) {
    Nics nics;
    EngineConfig both = nics.with(two_lanes("engine"));
    both.allow_fallback = fallback;
    const auto engine = must(TransferEngine::create(std::move(both)));
    nics[0].refuses = refusal(ErrorCode::kResources, "the limit of locked memory is reached");
    std::vector<std::byte> memory(kBytes);
    const Result<RegionId> region = engine->register_memory(memory.data(), memory.size());
    EXPECT_EQ(region.ok(), fallback);
    if (region.ok()) {
      must(engine->deregister_memory(region.value(), kLimit));
    } else {
      EXPECT_EQ(region.error().code, ErrorCode::kResources);
      EXPECT_TRUE(says(region.error(), "the limit of locked memory is reached"));
    }
    EXPECT_EQ(engine->stats().regions, 0U);
  }
}

// Any link may carry a write, and its domain needs the source. So a lane takes memory with all of its domains, or with
// none.
TEST(MemoryKinds, ALaneTakesMemoryWithAllItsDomainsOrNotAtAll) {
  Nics nics;
  nics[1].refuses = not_reached("the second NIC does not reach it");
  Side side(nics.with(two_lanes("engine", 2)), kBytes);
  Side over_sim(config("over-sim", "sim", 2), kBytes);
  const Connection sim = connect(*side.engine, *over_sim.engine);
  const RemoteRegionId region = import_all(side, sim.first_to_second, over_sim);
  for (uint32_t domain = 0; domain < 2; ++domain) {
    const Event failed = ended(*side.engine, must(side.engine->write_one(sim.first_to_second, side.region, 0, region, 0,
                                                                         kBytes, std::nullopt, {}, domain)));
    EXPECT_EQ(failed.kind, EventKind::kTransferFailed);
    EXPECT_TRUE(says(*failed.error, "the second NIC does not reach it")) << failed.error->to_string();
  }
}

// Of several ranges in one call, all are registered or none.
TEST(MemoryKinds, OneRangeThatIsRefusedRefusesTheCall) {
  Nics nics;
  const auto engine = must(TransferEngine::create(nics.with(config("engine", "sim"))));
  std::vector<std::byte> memory(3 * kBytes);
  std::byte* const good = memory.data();
  std::byte* const bad = good + 2 * kBytes;  // not adjacent to `good`: they would be merged
  nics[0].refuses = [&](const MemoryRange& range) {
    return range.base == bad ? not_reached("not this one")(range) : std::nullopt;
  };
  const std::vector<MemoryRange> ranges{{good, kBytes}, {bad, kBytes}};
  EXPECT_EQ(engine->register_memory(ranges).error().code, ErrorCode::kNotReachable);
  EXPECT_EQ(engine->stats().regions, 0U);
  must(engine->register_memory(good, kBytes));
}

}  // namespace
}  // namespace kvc::test::memory_kinds
