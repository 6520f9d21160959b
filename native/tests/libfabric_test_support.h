// Helpers for tests of the libfabric provider: two domains in one process, driven by one thread.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "providers/libfabric/domain.h"
#include "tests/domain_test_support.h"
#include "tests/rig.h"

namespace kvc::libfabric {

using test::Driven;
using test::must;

inline constexpr size_t kBytes = 1 << 20;
inline constexpr std::chrono::seconds kLong{20};
inline constexpr LinkId kA = test::kLinkOfA;
inline constexpr LinkId kB = test::kLinkOfB;

inline DomainConfig config_of(const std::string& device) {
  DomainConfig config;
  config.provider = "libfabric";
  config.device = device;
  return config;
}

// A domain with one registered region. It fences broken links, as the transfer engine does.
struct End {
  explicit End(const std::string& device, const Tuning& tuning = {}) : memory(kBytes) {
    try {
      domain = std::make_unique<Driven>(
          [&](ControlQueue& control) { return libfabric::open(config_of(device), control, tuning); });
    } catch (const std::runtime_error& error) {
      reason = error.what();
      return;
    }
    rkey = must(domain->register_region(memory.data(), memory.size()));
  }
  test::Record& record() { return domain->record; }
  void fence_broken() {
    for (const test::Record::Down& down : record().down) (void)domain->fence(down.link);
  }

  std::string reason;  // why there is no domain
  std::vector<std::byte> memory;
  std::unique_ptr<Driven> domain;
  uint64_t rkey = 0;
};

inline const std::vector<std::string> kDevices = {
    "tcp",
#ifndef KVC_THREAD_SANITIZER  // its progress thread is not compiled for the sanitizer, which misses its synchronisation
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
  void connect(LinkId of_a = kA, LinkId of_b = kB) { test::connect(*a->domain, *b->domain, of_a, of_b); }
  void run(const std::function<bool()>& done, const char* what) { run({a.get(), b.get()}, done, what); }
  static void run(const std::vector<End*>& ends, const std::function<bool()>& done, const char* what) {
    std::vector<Driven*> domains;
    for (End* end : ends) domains.push_back(end->domain.get());
    const auto step = [&] {
      for (End* end : ends) end->fence_broken();
      return done();
    };
    ASSERT_NO_FATAL_FAILURE(test::run_until(domains, step, what));
  }
  // Writes `pages` pages of 4 KiB from a, to the same offsets as in the source, the last page first.
  void post(WorkId work, uint32_t pages, uint64_t rkey, uint64_t first_offset = 0, LinkId link = kA) {
    test::Batch batch{.work = work, .rkey = rkey};
    for (uint32_t page = pages; page > 0; --page) {
      const uint64_t offset = uint64_t{page - 1} * 8192;  // with gaps: no two pages are contiguous
      batch.from.push_back(offset);
      batch.to.push_back(first_offset + offset);
    }
    ASSERT_EQ(test::post(*a, link, *b, batch), Posted::kYes);
  }
  // Under load, "sockets" loses one in some thousands of new connections in their first moments.
  void warm_up(LinkId link) {
    ASSERT_EQ(test::post(*a, link, *b, {.work = 9000 + link, .from = {0}, .to = {0}, .counted = false}), Posted::kYes);
    EXPECT_FALSE(ended(9000 + link).has_value());
  }
  std::optional<Error> ended(WorkId work) {
    run([&] { return a->record().completed.count(work) == 1; }, "the batch to end");
    return a->record().completed[work];
  }

  std::unique_ptr<End> a;
  std::unique_ptr<End> b;
};

}  // namespace kvc::libfabric
