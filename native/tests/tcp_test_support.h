// What the tests of the tcp provider share: two domains with memory.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "providers/tcp/domain.h"
#include "providers/tcp/wire.h"
#include "tests/domain_test_support.h"

namespace kvc::tcp {

using test::Batch;
using test::kLinkOfA;
using test::kLinkOfB;
using test::post;
using test::RecordingSink;
using test::run_idle;
using test::run_until;

// A domain with one registered region.
struct End {
  explicit End(const Tuning& tuning = {}, uint32_t connections = 2, size_t bytes = 4 << 20,
               const std::string& address = "127.0.0.1")
      : memory(bytes) {
    DomainConfig config;
    config.provider = "tcp";
    config.address = address;
    config.connections = connections;
    auto opened = TcpDomain::open(config, sink, tuning);
    if (!opened) {
      ADD_FAILURE() << opened.error().to_string();
      return;
    }
    domain = std::move(opened.value());
    rkey = domain->register_region(memory.data(), memory.size(), -1, 0).value();
  }

  // Deterministic bytes that differ from page to page and from seed to seed.
  void fill(uint64_t seed) { test::fill_random(memory.data(), memory.size(), seed); }

  RecordingSink sink;
  std::vector<std::byte> memory;
  std::unique_ptr<TcpDomain> domain;
  uint64_t rkey = 0;
};

// Two domains with one link between them; A offered, B dialed.
struct Pair {
  explicit Pair(const Tuning& tuning = {}, uint32_t connections = 2, size_t bytes = 4 << 20)
      : a(tuning, connections, bytes), b(tuning, connections, bytes) {}

  void connect() { test::connect(*a.domain, *b.domain); }
  std::vector<Domain*> both() { return {a.domain.get(), b.domain.get()}; }
  void run_until(const std::function<bool()>& done, const char* what = "condition") {
    test::run_until(both(), done, what);
  }

  End a;
  End b;
};

}  // namespace kvc::tcp
