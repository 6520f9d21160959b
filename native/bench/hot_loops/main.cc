// Runs one of the hot loops under a tool that counts its instructions: integration/benchmarks/count-instructions.
//
//     kvc_hot_loops submit | submit_one | post | count   NUMBER
//     kvc_hot_loops scatter | prepared_scatter | barrier | prepared_barrier | experts   NUMBER PEERS
//
// NUMBER is the number of calls, of pages (post), of immediates (count), or of member writes in total, independent of
// PEERS.

#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <string_view>

#include "bench/expert_steps.h"
#include "bench/group_steps.h"
#include "bench/micro.h"

namespace {

constexpr uint32_t kPagesARequest = 2048;
constexpr uint64_t kPageBytes = 64;
constexpr uint32_t kExpertRowBytes = 64;
constexpr uint32_t kCounters = 61;
// In microseconds: the transfer thread that writes never sleeps during the loop.
constexpr uint32_t kAwake = 1'000'000;

bool run(std::string_view loop, uint32_t number) {
  if (loop == "submit") {
    kvc::bench::submit_write(number);
  } else if (loop == "submit_one") {
    kvc::bench::submit_write_one(number);
  } else if (loop == "post") {
    kvc::bench::post_pages((number + kPagesARequest - 1) / kPagesARequest, kPagesARequest, kPageBytes);
  } else if (loop == "count") {
    kvc::bench::count_immediates(number, kCounters);
  } else {
    return false;
  }
  return true;
}

bool run(std::string_view loop, uint32_t number, uint32_t peers) {
  kvc::DomainConfig sim;
  sim.provider = "sim";
  sim.fabric = "hot loops";
  sim.max_delay_us = 0;
  if (loop == "experts") {  // each rank has a dispatch and a combine in a step
    kvc::bench::ExpertSteps({sim}, {sim}, kAwake, peers, 1, kExpertRowBytes, false)
        .steps(number / (2 * (peers + 1) * peers));
    return true;
  }
  kvc::bench::GroupSteps group({sim}, {sim}, kAwake, peers, kPageBytes, false);
  if (loop == "scatter") {
    group.scatter(number / peers);
  } else if (loop == "prepared_scatter") {
    group.prepared_scatter(number / peers);
  } else if (loop == "barrier") {
    group.barrier(number / peers);
  } else if (loop == "prepared_barrier") {
    group.prepared_barrier(number / peers);
  } else {
    return false;
  }
  return true;
}

std::optional<uint32_t> number_of(const char* word) {
  uint32_t number = 0;
  const bool good = std::from_chars(word, word + std::strlen(word), number).ec == std::errc() && number > 0;
  return good ? std::optional(number) : std::nullopt;
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = argc > 2 ? number_of(argv[2]) : std::nullopt;
  const auto peers = argc > 3 ? number_of(argv[3]) : std::nullopt;
  try {
    if (number && argc == 3 && run(argv[1], *number)) return 0;
    if (number && peers && argc == 4 && run(argv[1], *number, *peers)) return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvc_hot_loops: %s\n", error.what());
    return 1;
  }
  std::fprintf(stderr,
               "usage: kvc_hot_loops submit|submit_one|post|count NUMBER\n"
               "       kvc_hot_loops scatter|prepared_scatter|barrier|prepared_barrier|experts NUMBER PEERS\n");
  return 2;
}
