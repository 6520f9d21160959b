// Our transfer engine over verbs between two processes, for comparison with perftest on the same NICs:
// integration/soft_roce/bench.
//
//     kvc_verbs_bench bandwidth DEVICE_A DEVICE_B PAGE_BYTES PAGES   MiB/s of pages in random order, and pages a second
//     kvc_verbs_bench latency   DEVICE_A DEVICE_B BYTES ITERATIONS   us, median: half the round trip of one WriteImm to
//                                                                    its counter; both transfer threads wait for events
//     kvc_verbs_bench ticks                                          processor ticks a microsecond (x86's counter)
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <semaphore>
#include <string>
#include <vector>

#include "engine/transfer_engine.h"

namespace {

using kvc::Bytes;
using Clock = std::chrono::steady_clock;

template <typename T>
T must(kvc::Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "%s\n", result.error().to_string().c_str());
    std::exit(1);
  }
  return std::move(result.value());
}
void must(kvc::Status status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.error().to_string().c_str());
  std::exit(1);
}

// The control plane of this benchmark: length and bytes over a socket pair.
struct Wire {
  int fd;
  void put(const Bytes& bytes) const {
    const uint64_t length = bytes.size();
    if (::write(fd, &length, 8) != 8 || ::write(fd, bytes.data(), length) != static_cast<ssize_t>(length)) std::exit(1);
  }
  Bytes get() const {
    uint64_t length = 0;
    if (::recv(fd, &length, 8, MSG_WAITALL) != 8) std::exit(1);
    Bytes bytes(length);
    if (::recv(fd, bytes.data(), length, MSG_WAITALL) != static_cast<ssize_t>(length)) std::exit(1);
    return bytes;
  }
  void put_number(uint64_t value) const {
    Bytes bytes(8);
    std::memcpy(bytes.data(), &value, 8);
    put(bytes);
  }
  uint64_t get_number() const {
    uint64_t value = 0;
    std::memcpy(&value, get().data(), 8);
    return value;
  }
};

struct Side {
  Wire wire;
  std::vector<std::byte> memory;
  std::unique_ptr<kvc::TransferEngine> engine;
  kvc::RegionId region = 0;
  kvc::PeerId peer = 0;
  kvc::RemoteRegionId remote = 0;

  Side(int fd, bool first, const std::string& device, size_t bytes, uint32_t spin_us) : wire{fd}, memory(bytes) {
    kvc::EngineConfig config;
    config.name = first ? "first" : "second";
    config.spin_us = spin_us;
    kvc::DomainConfig domain;
    domain.provider = "verbs";
    domain.device = device;
    config.domains.push_back(domain);
    engine = must(kvc::TransferEngine::create(config));
    region = must(engine->register_memory(memory.data(), memory.size()));
    if (first) {
      const kvc::Handshake offer = must(engine->offer("second"));
      wire.put(offer.bytes);
      must(engine->complete(offer.peer, wire.get()));
      peer = offer.peer;
    } else {
      const kvc::Handshake answer = must(engine->accept("first", wire.get()));
      wire.put(answer.bytes);
      peer = answer.peer;
    }
    wire.put(must(engine->region_descriptor(region)));
    remote = must(engine->import_region(peer, wire.get()));
  }
};

std::vector<int64_t> shuffled(size_t count, size_t of, std::mt19937_64& random) {
  std::vector<int64_t> indices(of);
  std::iota(indices.begin(), indices.end(), 0);
  std::shuffle(indices.begin(), indices.end(), random);
  indices.resize(count);
  return indices;
}

// Pages are in random order on both sides, so that no two pages are one write.
void bandwidth(Side& side, bool first, uint64_t page_bytes, uint64_t pages) {
  const size_t slots = side.memory.size() / page_bytes;
  if (!first) {
    const kvc::CounterSet set = must(side.engine->alloc_counters(1));
    must(side.engine->expect(set.id, {pages}));
    side.wire.put_number(set.immediates[0]);
    must(side.engine->wait_counters(set.id, std::chrono::seconds(300)));
    side.wire.put_number(1);
    (void)side.wire.get_number();
    return;
  }
  const auto immediate = static_cast<uint32_t>(side.wire.get_number());
  std::mt19937_64 random(1);
  std::vector<kvc::PagedWrite> writes;
  for (uint64_t left = pages; left > 0;) {
    const uint64_t count = std::min<uint64_t>(left, slots);
    kvc::PagedWrite write;
    write.page_bytes = page_bytes;
    write.source = side.region;
    write.target = side.remote;
    write.source_pages = {shuffled(count, slots, random), page_bytes, 0};
    write.target_pages = {shuffled(count, slots, random), page_bytes, 0};
    write.immediate = immediate;
    writes.push_back(std::move(write));
    left -= count;
  }
  const kvc::TransferId transfer = must(side.engine->open_transfer(side.peer));
  const Clock::time_point start = Clock::now();
  for (kvc::PagedWrite& write : writes) must(side.engine->write_pages(transfer, std::move(write)));
  must(side.engine->seal(transfer));
  const kvc::Event end = must(side.engine->wait_transfer(transfer, std::chrono::seconds(300)));
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (end.error) {
    std::fprintf(stderr, "%s\n", end.error->to_string().c_str());
    std::exit(1);
  }
  (void)side.wire.get_number();
  side.wire.put_number(1);
  std::printf("%.2f MiB/s %.0f pages/s\n", static_cast<double>(pages * page_bytes) / seconds / (1 << 20),
              static_cast<double>(pages) / seconds);
}

// Each counter's callback answers on the transfer thread.
void latency(Side& side, bool first, uint64_t bytes, uint64_t iterations) {
  std::vector<kvc::CounterSet> counters;
  for (uint64_t i = 0; i < iterations; ++i) counters.push_back(must(side.engine->alloc_counters(1)));
  std::vector<uint32_t> immediates;
  for (const kvc::CounterSet& set : counters) immediates.push_back(set.immediates[0]);
  Bytes words(iterations * sizeof(uint32_t));
  std::memcpy(words.data(), immediates.data(), words.size());
  side.wire.put(words);
  words = side.wire.get();
  std::memcpy(immediates.data(), words.data(), words.size());
  std::vector<double> halves(iterations);
  Clock::time_point sent;
  std::binary_semaphore done{0};
  const auto write = [&](uint64_t i) {
    sent = Clock::now();
    const bool last = i + 1 == iterations;
    (void)side.engine->write_one(side.peer, side.region, 0, side.remote, 0, bytes, immediates[i],
                                 [&, last](const kvc::Event&) {
                                   if (last && !first) done.release();
                                 });
  };
  for (uint64_t i = 0; i < iterations; ++i) {
    must(side.engine->expect(counters[i].id, {1}, [&, i](const kvc::Event&) {
      if (!first) return write(i);
      halves[i] = std::chrono::duration<double, std::micro>(Clock::now() - sent).count() / 2;
      if (i + 1 < iterations) return write(i + 1);
      done.release();
    }));
  }
  side.wire.put_number(1);  // all counters are armed
  (void)side.wire.get_number();
  if (first) write(0);
  done.acquire();
  side.wire.put_number(1);
  (void)side.wire.get_number();
  if (!first) return;
  std::sort(halves.begin(), halves.end());
  std::printf("%.2f us\n", halves[iterations / 2]);
}

// Prints the unit of perftest's times: the VM's /proc/cpuinfo names no clock rate.
void ticks() {
  const Clock::time_point start = Clock::now();
  const uint64_t first = __rdtsc();
  while (Clock::now() - start < std::chrono::milliseconds(200)) {
  }
  const uint64_t last = __rdtsc();
  std::printf("%.3f\n", static_cast<double>(last - first) /
                            std::chrono::duration<double, std::micro>(Clock::now() - start).count());
}

}  // namespace

int main(int count, char** words) {
  if (count == 2 && std::strcmp(words[1], "ticks") == 0) {
    ticks();
    return 0;
  }
  if (count != 6) {
    std::fprintf(stderr, "kvc_verbs_bench bandwidth|latency DEVICE_A DEVICE_B BYTES COUNT, or ticks\n");
    return 2;
  }
  const bool measures_latency = std::string(words[1]) == "latency";
  const uint64_t bytes = std::strtoull(words[4], nullptr, 0);
  const uint64_t number = std::strtoull(words[5], nullptr, 0);
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) return 1;
  const pid_t child = ::fork();  // before any engine: threads and NIC contexts do not survive it
  const bool first = child != 0;
  {
    // 128 buffers, like perftest's send queue. The default spin, or no spin where waiting by events is measured.
    const size_t memory = measures_latency ? std::max<uint64_t>(bytes, 4096) : bytes * 128;
    Side side(sockets[first ? 0 : 1], first, words[first ? 2 : 3], memory,
              measures_latency ? 0 : kvc::EngineConfig{}.spin_us);
    if (measures_latency) {
      latency(side, first, bytes, number);
    } else {
      bandwidth(side, first, bytes, number);
    }
  }
  if (!first) ::_exit(0);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}
