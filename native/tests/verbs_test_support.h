// Helpers for tests of the verbs provider: two domains driven by one thread. They use a stand-in for the library, or
// the real one if KVC_TEST_DEVICES names two NICs.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "providers/verbs/connector.h"
#include "providers/verbs/domain.h"
#include "tests/domain_test_support.h"
#include "tests/verbs_fake.h"
#include "tests/verbs_fake_library.h"

namespace kvc::verbs {

using test::Batch;
using test::Driven;
using test::fence;
using test::immediate_of;
using test::kLinkOfA;
using test::kLinkOfB;
using test::post;
using test::Record;
using test::run_idle;
using test::run_until;

// A domain with one registered region.
struct End {
  End(const Library& library, const std::string& device, const Tuning& tuning = {}, size_t bytes = 1 << 20)
      : memory(bytes),
        domain(std::make_unique<Driven>([&](ControlQueue& control) {
          DomainConfig config;
          config.provider = "verbs";
          config.device = device;
          return VerbsConnector::open(config, control, library, tuning);
        })),
        record(domain->record),
        rkey(test::must(domain->register_region(memory.data(), memory.size()))) {}
  // Deterministic bytes that differ between pages and between seeds.
  void fill(uint64_t seed) { test::fill_random(memory.data(), memory.size(), seed); }
  VerbsDomain::Held held() const { return static_cast<VerbsDomain&>(domain->domain()).held(); }

  std::vector<std::byte> memory;
  std::unique_ptr<Driven> domain;
  Record& record;
  uint64_t rkey;
};

// `pages` pages of 4 KiB, each to the mirrored place on the opposite side.
inline Batch pages(WorkId work, size_t pages, size_t first = 0) {
  Batch batch;
  batch.work = work;
  for (size_t i = 0; i < pages; ++i) {
    batch.from.push_back((first + i) * 4096);
    batch.to.push_back((first + pages - 1 - i) * 4096);
  }
  return batch;
}

inline void expect_written(const End& source, const End& target, const Batch& batch) {
  for (size_t i = 0; i < batch.to.size(); ++i) {
    ASSERT_EQ(std::memcmp(target.memory.data() + batch.to[i], source.memory.data() + batch.from[i], batch.page_bytes),
              0)
        << "page " << i;
  }
}

// Two domains. A offers.
struct Pair {
  Pair(const Library& library, const std::string& device_a, const std::string& device_b, const Tuning& tuning = {},
       size_t bytes = 1 << 20)
      : a(library, device_a, tuning, bytes), b(library, device_b, tuning, bytes) {}

  void connect(LinkId link_a = kLinkOfA, LinkId link_b = kLinkOfB) {
    test::connect(*a.domain, *b.domain, link_a, link_b);
  }
  std::vector<Driven*> both() { return {a.domain.get(), b.domain.get()}; }
  void run_until(const std::function<bool()>& done, const char* what = "condition") {
    test::run_until(both(), done, what);
  }
  // Ends the link on the side of A or of B, while both are driven.
  void fence(End& end, LinkId link) {
    run_until([&] { return end.domain->fence(link); }, "fence");
  }
  // Checks that nothing is left of links that were fenced on both sides.
  void expect_empty() {
    run_until([&] { return a.held().links == 0 && b.held().links == 0; }, "the ends of all links");
    for (const End* end : {&a, &b}) {
      EXPECT_EQ(end->held().credits_used, 0U);
      EXPECT_EQ(end->held().buffers_used, 0U);
    }
  }

  End a;
  End b;
};

struct TwoNics : fake::Fabric {
  TwoNics() {
    add_roce("nic0", 1);
    add_roce("nic1", 2);
  }
};

// The stand-in with two RoCE NICs, and a pair on them.
struct FakePair : TwoNics, Pair {
  explicit FakePair(const Tuning& tuning = {}) : Pair(fake::Fabric::library(), "nic0", "nic1", tuning) {}
};

}  // namespace kvc::verbs
