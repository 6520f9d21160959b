// The transfer engine's hot loops, one at a time, over `sim`: the cost of a submission for an application, and the cost
// of posting and counting for the transfer thread. `kv-connector bench micro` measures their time,
// integration/benchmarks/count-instructions their instructions.
//
// Failures are exceptions (std::runtime_error with the transfer engine's message).
#pragma once

#include <cstdint>
#include <vector>

namespace kvc::bench {

// Return the nanoseconds that each of `iterations` calls took until it returned; the command is in the transfer
// thread's queue then. submit_write() writes one page on an open transfer. submit_write_one() opens and seals a
// transfer for each write.
std::vector<double> submit_write(uint32_t iterations);
std::vector<double> submit_write_one(uint32_t iterations);

// Returns the nanoseconds a page that the transfer thread took to post `pages` pages of `page_bytes` of one request.
// The time runs from the first post to the last one and includes all other work of the thread. There is one entry for
// each of `iterations` requests.
std::vector<double> post_pages(uint32_t iterations, uint32_t pages, uint64_t page_bytes);

// Returns the immediates a second that one thread counts, spread over `counters` counters whose targets are never
// reached.
double count_immediates(uint64_t immediates, uint32_t counters);

// Returns the median nanoseconds of reading the clock twice: the floor of the figures above.
double clock_cost();

}  // namespace kvc::bench
