// Runs one of the hot loops, for a tool that counts its instructions: scripts/count-instructions.
//
//   kvc_hot_loops submit | submit_one | post | count   NUMBER

#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string_view>

#include "bench/micro.h"

namespace {

constexpr uint32_t kPagesARequest = 2048;
constexpr uint64_t kPageBytes = 64;
constexpr uint32_t kCounters = 61;

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

}  // namespace

int main(int argc, char** argv) {
  uint32_t number = 0;
  const bool numbered =
      argc == 3 && std::from_chars(argv[2], argv[2] + std::strlen(argv[2]), number).ec == std::errc() && number > 0;
  try {
    if (numbered && run(argv[1], number)) return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvc_hot_loops: %s\n", error.what());
    return 1;
  }
  std::fprintf(stderr, "usage: kvc_hot_loops submit|submit_one|post|count NUMBER\n");
  return 2;
}
