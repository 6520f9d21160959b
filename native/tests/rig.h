// Helpers for tests of the transfer engine: two connected transfer engines, memory on both sides, and waits with a
// limit.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/shared_memory.h"
#include "engine/transfer_engine.h"

namespace kvc::test {

// The comma-separated words of an environment variable; `otherwise` if it is not set.
inline std::vector<std::string> words_of(const char* variable, std::vector<std::string> otherwise) {
  const char* const text = std::getenv(variable);
  if (text == nullptr) return otherwise;
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) words.push_back(word);
  return words;
}

// "libfabric" for "libfabric:tcp", and "tcp" for "tcp/3", which is the same lane with 3 transfer threads.
inline std::string provider_of(const std::string& lane) { return lane.substr(0, lane.find_first_of(":/")); }
// Makes a lane usable in a test name.
inline std::string label(std::string lane) {
  std::replace_if(lane.begin(), lane.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return lane;
}

// KVC_TEST_DEVICES names the NICs to use, alternating between the two sides. With "rxe0,rxe1,rxe2,rxe3", the sender's
// domains are rxe0 and rxe2, and all others are rxe1 and rxe3. Not set: the provider chooses.
inline std::string device(const std::string& engine, size_t domain) {
  static const std::vector<std::string> names = words_of("KVC_TEST_DEVICES", {""});
  const bool sends = engine == "sender" || engine == "first" || engine == "client";
  return names[(domain * 2 + (sends ? 0 : 1)) % names.size()];
}

// Long enough for a loaded machine under a sanitizer. A test that reaches the limit has failed.
inline constexpr Timeout kLimit = std::chrono::seconds(30);

template <typename T>
T must(Result<T> result, const char* what = "") {
  if (!result.ok()) throw std::runtime_error(std::string(what) + " " + result.error().to_string());
  return std::move(result.value());
}
inline void must(Status status) {
  if (!status.ok()) throw std::runtime_error(status.error().to_string());
}

// Waits for a condition that no event reports.
template <typename Condition>
void await(Condition condition, const char* what) {
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error(std::string("waited for ") + what);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// KVC_TEST_DOMAINS: number of domains (NICs) for each domain that a test requests.
inline EngineConfig config(const std::string& name, const std::string& provider, size_t domains = 1) {
  static const char* const times = std::getenv("KVC_TEST_DOMAINS");
  if (times != nullptr) domains *= std::strtoul(times, nullptr, 10);
  EngineConfig config;
  config.name = name;
  const size_t slash = provider.find('/');
  if (slash != std::string::npos) config.workers = static_cast<uint32_t>(std::stoul(provider.substr(slash + 1)));
  const size_t colon = provider.find(':');
  for (size_t i = 0; i < domains; ++i) {
    DomainConfig domain;
    domain.provider = provider_of(provider);
    if (colon != std::string::npos) domain.device = provider.substr(colon + 1, slash - colon - 1);
    if (provider == "verbs") domain.device = device(name, i);
    domain.seed = 7 + i;
    config.domains.push_back(domain);
  }
  return config;
}

// The lanes of the conformance list, each as PROVIDER[:DEVICE][/WORKERS]. KVC_TEST_PROVIDERS names others, for machines
// that have them. Lanes whose library is missing are left out, and the reason is printed.
inline const std::vector<std::string>& providers() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> lanes = words_of(
        "KVC_TEST_PROVIDERS", {"sim", "host", "tcp", "libfabric:tcp", "shuffle:tcp", "bounce:tcp", "sim/3", "tcp/3"});
    std::erase_if(lanes, [](const std::string& lane) {
      if (lane.find("libfabric") == std::string::npos) return false;
      const auto engine = TransferEngine::create(config("probe", lane));
      if (!engine.ok()) std::fprintf(stderr, "left out: %s: %s\n", lane.c_str(), engine.error().to_string().c_str());
      return !engine.ok();
    });
    return lanes;
  }();
  return names;
}

// Uses SplitMix64, because a generator with a table takes seconds for 8 MiB under a sanitizer.
inline void fill_random(std::byte* data, size_t bytes, uint64_t seed) {
  for (size_t i = 0; i < bytes; i += 8) {
    uint64_t value = seed * 0xD1342543DE82EF95U + (i + 8) * 0x9E3779B97F4A7C15U;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
    value ^= value >> 31;
    std::memcpy(data + i, &value, std::min<size_t>(8, bytes - i));
  }
}

// Replaces == of vectors, which compares single bytes and took most of the time of tests with large pages under a
// sanitizer.
inline bool same(std::span<const std::byte> one, std::span<const std::byte> other) {
  return one.size() == other.size() && (one.empty() || std::memcmp(one.data(), other.data(), one.size()) == 0);
}

// The number at the beginning of a test's message.
inline uint32_t number_of(const Bytes& bytes) {
  uint32_t number = 0;
  std::memcpy(&number, bytes.data(), sizeof(number));
  return number;
}

// A transfer engine with one registered region of shared memory.
struct Side {
  SharedMemory memory;  // outlives the transfer engine
  std::unique_ptr<TransferEngine> engine;
  RegionId region = 0;

  Side(EngineConfig engine_config, size_t bytes)
      : memory(must(SharedMemory::create("kvc-test", bytes))),
        engine(must(TransferEngine::create(std::move(engine_config)), "create")),
        region(must(engine->register_memory(memory.data(), memory.size(), memory.fd(), 0), "register_memory")) {}
  std::byte* data() const { return memory.data(); }
};

// Makes a connection in three steps, as a control plane would. `first` offers.
struct Connection {
  PeerId first_to_second = 0;
  PeerId second_to_first = 0;
};
inline Connection connect(TransferEngine& first, TransferEngine& second) {
  Handshake offer = must(first.offer(second.config().name), "offer");
  Handshake answer = must(second.accept(first.config().name, offer.bytes), "accept");
  must(first.complete(offer.peer, answer.bytes));
  return {offer.peer, answer.peer};
}

// `sender` offers to `receiver`, and each imports the other's region.
struct Pair {
  Side sender;
  Side receiver;
  PeerId to_receiver = 0;
  PeerId to_sender = 0;
  RemoteRegionId receiver_region = 0;  // the sender's id of it
  RemoteRegionId sender_region = 0;    // the receiver's id of it

  Pair(EngineConfig sender_config, EngineConfig receiver_config, size_t bytes)
      : sender(std::move(sender_config), bytes), receiver(std::move(receiver_config), bytes) {
    const Connection connection = connect(*sender.engine, *receiver.engine);
    to_receiver = connection.first_to_second;
    to_sender = connection.second_to_first;
    receiver_region = must(
        sender.engine->import_region(to_receiver, must(receiver.engine->region_descriptor(receiver.region))), "import");
    sender_region = must(
        receiver.engine->import_region(to_sender, must(sender.engine->region_descriptor(sender.region))), "import");
  }
  Pair(const std::string& provider, size_t bytes, size_t sender_domains = 1, size_t receiver_domains = 1)
      : Pair(config("sender", provider, sender_domains), config("receiver", provider, receiver_domains), bytes) {}

  // The links beside the first one are made when there is something to write. Waits until all of them are up.
  void make_links() {
    const size_t links = std::max(sender.engine->domains().size(), receiver.engine->domains().size());
    if (links == 1) return;
    const TransferId write =
        must(sender.engine->write_one(to_receiver, sender.region, 0, receiver_region, 0, 1, std::nullopt));
    must(sender.engine->wait_transfer(write, kLimit));
    await([&] { return sender.engine->stats().links >= links && receiver.engine->stats().links >= links; },
          "all links");
  }
  // Allocates a receiver's counter with a target. Returns it with the immediate that raises it.
  std::pair<CounterSetId, uint32_t> counter(uint64_t target) {
    CounterSet set = must(receiver.engine->alloc_counters(1));
    must(receiver.engine->expect(set.id, {target}));
    return {set.id, set.immediates[0]};
  }
  uint64_t count(CounterSetId set) { return must(receiver.engine->counter_values(set))[0]; }
};

// Returns the next event that no thread waits for.
inline Event next_event(TransferEngine& engine) {
  const auto limit = std::chrono::steady_clock::now() + kLimit;
  while (std::chrono::steady_clock::now() < limit) {
    std::vector<Event> events = engine.poll_events(1);
    if (!events.empty()) return events[0];
    std::this_thread::yield();
  }
  throw std::runtime_error("no event");
}

// Returns the final event of a transfer. Fails the test if none arrives.
inline Event ended(TransferEngine& engine, TransferId transfer) {
  Result<Event> event = engine.wait_transfer(transfer, kLimit);
  if (!event.ok()) throw std::runtime_error(event.error().to_string());
  return event.value();
}

// Returns `count` different numbers below `of`, in random order.
inline std::vector<int64_t> shuffled(size_t count, size_t of, uint64_t seed) {
  // Floyd's sampling draws each number from a growing range, so a few out of millions need few draws.
  std::mt19937_64 random(seed);
  std::unordered_set<int64_t> chosen;
  std::vector<int64_t> indices;
  for (size_t limit = of - count; limit < of; ++limit) {
    const auto draw = static_cast<int64_t>(random() % (limit + 1));
    indices.push_back(chosen.insert(draw).second ? draw : static_cast<int64_t>(limit));
    chosen.insert(indices.back());
  }
  std::shuffle(indices.begin(), indices.end(), random);
  return indices;
}

}  // namespace kvc::test
