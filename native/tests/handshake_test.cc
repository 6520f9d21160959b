// Bytes from another process are untrusted. Every message that is not exactly well-formed is refused, and no input
// makes a decoder read beyond its end (the address sanitizer checks it).

#include "engine/handshake.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "base/byte_codec.h"
#include "tests/rig.h"

namespace kvc {
namespace {

Bytes bytes_of(std::initializer_list<int> values) {
  Bytes bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

Offer sample_offer() {
  return Offer{"prefill-0", {{"host", 2, 1, bytes_of({1, 2})}, {"tcp", 1, 0, bytes_of({9, 9, 9})}}};
}
Answer sample_answer() { return Answer{"decode-0", "tcp", 3, 2, bytes_of({5, 6})}; }
// Two pieces of memory, with three regions in them. The second lane does not take one of the pieces.
RegionDescriptor sample_region() {
  return RegionDescriptor{{{"host", 2}, {"tcp", 1}},
                          {{0x7f0000001000, 1 << 30, {{1, 2}, {UINT64_MAX}}}, {0x1000, 4096, {{3, 4}, {}}}},
                          {{0, 0, 1 << 20}, {1, 96, 4000}, {0, 1 << 20, 77}}};
}

TEST(Handshake, MessagesSurviveTheWire) {
  const std::optional<Offer> offer = decode_offer(encode(sample_offer()));
  ASSERT_TRUE(offer);
  EXPECT_EQ(offer->engine, "prefill-0");
  ASSERT_EQ(offer->lanes.size(), 2U);
  EXPECT_EQ(offer->lanes[0].provider, "host");
  EXPECT_EQ(offer->lanes[0].domains, 2U);
  EXPECT_EQ(offer->lanes[0].domain, 1U);
  EXPECT_EQ(offer->lanes[0].link, sample_offer().lanes[0].link);
  EXPECT_EQ(offer->lanes[1].link, sample_offer().lanes[1].link);

  const std::optional<Answer> answer = decode_answer(encode(sample_answer()));
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->engine, "decode-0");
  EXPECT_EQ(answer->provider, "tcp");
  EXPECT_EQ(answer->domains, 3U);
  EXPECT_EQ(answer->domain, 2U);
  EXPECT_EQ(answer->link, sample_answer().link);

  const std::optional<RegionDescriptor> region = decode_region_descriptor(encode(sample_region()));
  ASSERT_TRUE(region);
  ASSERT_EQ(region->lanes.size(), 2U);
  EXPECT_EQ(region->lanes[0].provider, "host");
  ASSERT_EQ(region->memories.size(), 2U);
  EXPECT_EQ(region->memories[0].base, 0x7f0000001000U);
  EXPECT_EQ(region->memories[0].bytes, 1U << 30);
  EXPECT_EQ(region->memories[0].rkeys, sample_region().memories[0].rkeys);
  EXPECT_EQ(region->memories[1].rkeys, sample_region().memories[1].rkeys);
  ASSERT_EQ(region->regions.size(), 3U);
  EXPECT_EQ(region->regions[1].memory, 1U);
  EXPECT_EQ(region->regions[1].offset, 96U);
  EXPECT_EQ(region->regions[1].bytes, 4000U);
}

TEST(Handshake, OneKindIsNotAnother) {
  EXPECT_FALSE(decode_offer(encode(sample_answer())));
  EXPECT_FALSE(decode_answer(encode(sample_region())));
  EXPECT_FALSE(decode_region_descriptor(encode(sample_offer())));
}

TEST(Handshake, EveryTruncationAndEveryExtensionIsRefused) {
  const auto check = [](const Bytes& whole, auto decode) {
    for (size_t length = 0; length < whole.size(); ++length) {
      // An exact heap copy, so that the sanitizer detects a read of one byte too many.
      const auto copy = std::make_unique<std::byte[]>(length);
      std::copy_n(whole.begin(), length, copy.get());
      EXPECT_FALSE(decode(std::span<const std::byte>(copy.get(), length))) << length;
    }
    Bytes longer = whole;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(decode(longer));
  };
  check(encode(sample_offer()), decode_offer);
  check(encode(sample_answer()), decode_answer);
  check(encode(sample_region()), decode_region_descriptor);
}

TEST(Handshake, LimitsHold) {
  Offer offer = sample_offer();
  offer.lanes[0].domains = kMaxDomains + 1;
  EXPECT_FALSE(decode_offer(encode(offer)));
  offer = sample_offer();
  offer.lanes[0].domain = offer.lanes[0].domains;
  EXPECT_FALSE(decode_offer(encode(offer)));
  offer = sample_offer();
  offer.lanes[0].link.resize(kMaxLinkBytes + 1);
  EXPECT_FALSE(decode_offer(encode(offer)));
  offer = sample_offer();
  offer.lanes[0].domains = 0;
  EXPECT_FALSE(decode_offer(encode(offer)));
  offer = sample_offer();
  offer.lanes.resize(kMaxLanes + 1, offer.lanes[0]);
  EXPECT_FALSE(decode_offer(encode(offer)));
  offer = sample_offer();
  offer.engine.assign(kMaxNameBytes + 1, 'x');
  EXPECT_FALSE(decode_offer(encode(offer)));
  Answer answer = sample_answer();
  answer.domain = 3;
  EXPECT_FALSE(decode_answer(encode(answer)));
  const auto refused = [](auto change) {
    RegionDescriptor region = sample_region();
    change(region);
    return !decode_region_descriptor(encode(region));
  };
  EXPECT_TRUE(refused([](RegionDescriptor& region) { region.memories[0].bytes = 0; }));
  EXPECT_TRUE(refused([](RegionDescriptor& region) {  // ends beyond the address space
    region.memories[0].bytes = UINT64_MAX - region.memories[0].base + 1;
  }));
  EXPECT_TRUE(refused([](RegionDescriptor& region) { region.lanes[0].domains = 0; }));
  EXPECT_TRUE(refused([](RegionDescriptor& region) { region.memories.clear(); }));
  EXPECT_TRUE(refused([](RegionDescriptor& region) { region.regions.clear(); }));
  EXPECT_TRUE(refused([](RegionDescriptor& region) { region.regions[1].memory = 2; }));
  EXPECT_TRUE(refused([](RegionDescriptor& region) { region.regions[1].bytes = 0; }));
  EXPECT_TRUE(refused([](RegionDescriptor& region) { region.regions[1].offset = 97; }));  // outside its memory
  EXPECT_TRUE(refused([](RegionDescriptor& region) { region.regions[1].offset = UINT64_MAX; }));
}

// Seeded mutations of valid messages, and noise. For most results, the test only checks that the decoders return.
TEST(Handshake, DecodersSurviveMutations) {
  std::mt19937_64 random(2025);
  const std::vector<Bytes> seeds = {encode(sample_offer()), encode(sample_answer()), encode(sample_region())};
  size_t accepted = 0;
  for (int round = 0; round < 30000; ++round) {
    Bytes bytes = seeds[random() % seeds.size()];
    for (uint64_t edits = 1 + random() % 4; edits > 0; --edits) {
      switch (random() % 3) {
        case 0:
          bytes[random() % bytes.size()] = static_cast<std::byte>(random());
          break;
        case 1:
          bytes.resize(1 + random() % bytes.size());
          break;
        default:
          bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(random() % bytes.size()),
                       static_cast<std::byte>(random()));
      }
    }
    const auto copy = std::make_unique<std::byte[]>(bytes.size());
    std::copy(bytes.begin(), bytes.end(), copy.get());
    const std::span<const std::byte> exact(copy.get(), bytes.size());
    accepted += decode_offer(exact).has_value();
    accepted += decode_answer(exact).has_value();
    accepted += decode_region_descriptor(exact).has_value();
  }
  EXPECT_GT(accepted, 0U);  // changed names and keys still give valid messages: not all mutations are trivial
}

TEST(Handshake, AnEngineSurvivesMutatedOffersAnswersAndDescriptors) {
  using namespace test;
  std::mt19937_64 random(7);
  for (const std::string& provider : providers()) {
    Side first(config("first", provider), 4096);
    Side second(config("second", provider), 4096);
    const auto mutate = [&](Bytes bytes) {
      for (uint64_t edits = 1 + random() % 3; edits > 0; --edits)
        bytes[random() % bytes.size()] = static_cast<std::byte>(random());
      return bytes;
    };
    for (int round = 0; round < 50; ++round) {
      const Handshake offer = must(first.engine->offer("second"));
      const Result<Handshake> answer = second.engine->accept("first", mutate(offer.bytes));
      if (!answer.ok()) {
        must(first.engine->fence(offer.peer, kLimit));
        continue;
      }
      if (!first.engine->complete(offer.peer, mutate(answer.value().bytes)).ok()) {
        EXPECT_EQ(first.engine->fence(offer.peer, kLimit).error().code, ErrorCode::kUnknownPeer);
      } else {
        (void)first.engine->import_region(offer.peer, mutate(must(second.engine->region_descriptor(second.region))));
        must(first.engine->fence(offer.peer, kLimit));
      }
      must(second.engine->fence(answer.value().peer, kLimit));
    }
    EXPECT_EQ(first.engine->stats().peers, 0U) << provider;
    EXPECT_EQ(second.engine->stats().peers, 0U) << provider;
    // The two transfer engines can still connect.
    const Connection connection = connect(*first.engine, *second.engine);
    const RemoteRegionId region = must(
        first.engine->import_region(connection.first_to_second, must(second.engine->region_descriptor(second.region))));
    const TransferId transfer =
        must(first.engine->write_one(connection.first_to_second, first.region, 0, region, 0, 4096, std::nullopt));
    EXPECT_EQ(ended(*first.engine, transfer).kind, EventKind::kTransferDone) << provider;
  }
}

}  // namespace
}  // namespace kvc
